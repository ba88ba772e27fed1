"""learn2learn's image benchmarks as episodes in memory."""

import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from drawings import draw, draw_cifarfs, draw_omniglot
from PIL import Image

from l2l_niw.data import ClassTaskset, ImageTaskset, Images, OpenSetQueries, get_tasksets, images, load_images
from l2l_niw.errors import ArgumentError, DataError, NIWError

import learn2learn as l2l


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    images._read.cache_clear()
    monkeypatch.delenv("L2L_NIW_DATA", raising=False)


@pytest.fixture
def cifarfs(tmp_path):
    for seed, mode in enumerate(("train", "val", "test")):
        draw(tmp_path / "cifarfs" / "processed" / mode, ["whale", "apple", "bee"], 6, (32, 32, 3), seed)
    return tmp_path


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_cifarfs_has_the_pictures_that_learn2learn_s_loader_gives(split, cifarfs):
    found = load_images("cifarfs", split, cifarfs)
    theirs = l2l.vision.datasets.CIFARFS(str(cifarfs), mode=split)
    assert len(theirs) == len(found.labels)
    for i, (picture, label) in enumerate(theirs):
        assert np.array_equal(np.asarray(picture), found.pixels[i].permute(1, 2, 0).numpy())
        assert label == found.labels[i]


def test_pictures_are_opened_once_until_one_of_them_changes(cifarfs, monkeypatch):
    opened = []
    read = images.read_files
    monkeypatch.setattr(images, "read_files", lambda files, *rest: opened.append(len(files)) or read(files, *rest))

    def load():
        images._read.cache_clear()
        return load_images("cifarfs", "test", cifarfs)

    first, again = load(), load()
    assert opened == [18]
    assert torch.equal(first.pixels, again.pixels)
    assert torch.equal(first.labels, again.labels)
    white = np.full((32, 32, 3), 255, dtype=np.uint8)
    Image.fromarray(white).save(cifarfs / "cifarfs" / "processed" / "test" / "bee" / "0.png")
    changed = load()
    assert opened == [18, 18]
    assert changed.pixels[6].eq(255).all()
    assert torch.equal(changed.pixels[7:], first.pixels[7:])


def test_fc100_is_read_from_learn2learn_s_pickle_and_from_folders(tmp_path):
    data = np.random.default_rng(0).integers(256, size=(6, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "FC100_val.pickle").write_bytes(pickle.dumps({"data": data, "labels": [7, 3, 3, 7, 9, 9]}))
    found = load_images("fc100", "validation", tmp_path)
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert np.array_equal(found.pixels.permute(0, 2, 3, 1), data[[1, 2, 0, 3, 4, 5]])
    draw(tmp_path / "fc100-png" / "test", ["a", "b"], 2, (32, 32, 3))
    assert load_images("fc100", "test", tmp_path).pixels.shape == (4, 3, 32, 32)


def test_mini_imagenet_is_learn2learn_s(tmp_path):
    data = np.random.default_rng(0).integers(256, size=(4, 84, 84, 3), dtype=np.uint8)
    kept = {"image_data": data, "class_dict": {"dog": [0, 2], "cat": [1, 3]}}
    (tmp_path / "mini-imagenet-cache-train.pkl").write_bytes(pickle.dumps(kept))
    found = load_images("mini-imagenet", "train", tmp_path)
    theirs = l2l.vision.datasets.MiniImagenet(str(tmp_path), mode="train")
    assert found.labels.tolist() == [0, 0, 1, 1]
    for k in (0, 1):
        own = torch.stack([x for x, y in theirs if y == k])
        assert torch.equal(found.pixels[found.labels == k].float(), own)


def test_tiered_imagenet_is_learn2learn_s(tmp_path):
    data = np.random.default_rng(0).integers(256, size=(4, 84, 84, 3), dtype=np.uint8)
    encoded = []
    for picture in data:
        buffer = io.BytesIO()
        Image.fromarray(picture[:, :, ::-1]).save(buffer, "png")
        encoded.append(np.frombuffer(buffer.getvalue(), dtype=np.uint8))
    (tmp_path / "tiered-imagenet").mkdir()
    (tmp_path / "tiered-imagenet" / "test_images_png.pkl").write_bytes(pickle.dumps(encoded))
    labels = {"label_specific": np.array([5, 2, 2, 5])}
    (tmp_path / "tiered-imagenet" / "test_labels.pkl").write_bytes(pickle.dumps(labels))
    found = load_images("tiered-imagenet", "test", tmp_path)
    theirs = l2l.vision.datasets.TieredImagenet(str(tmp_path), mode="test")
    assert found.labels.tolist() == [0, 0, 1, 1]
    for own, i in zip(found.pixels, [1, 2, 0, 3]):
        assert np.array_equal(own.permute(1, 2, 0), np.asarray(theirs[i][0]))


def test_omniglot_s_folders_are_enough_and_its_splits_share_no_character(tmp_path, monkeypatch):
    draw_omniglot(tmp_path, monkeypatch, each=3)
    splits = [load_images("omniglot", split, tmp_path) for split in ("train", "validation", "test")]
    assert [len(s.labels.unique()) for s in splits] == [4, 2, 2]
    everything = torch.cat([s.pixels for s in splits])
    assert everything.shape == (24, 1, 28, 28)
    assert len(everything.flatten(1).unique(dim=0)) == 24
    path = next((tmp_path / "omniglot-py" / "images_evaluation" / "Korean" / "a").iterdir())
    small = 255 - np.asarray(Image.open(path).convert("L").resize((28, 28), Image.Resampling.LANCZOS))
    assert (everything[:, 0] == torch.from_numpy(small)).all(-1).all(-1).sum() == 1
    monkeypatch.setattr(images, "CHARACTERS", 9)
    images._read.cache_clear()
    with pytest.raises(DataError, match="has 9 characters, but 8"):
        load_images("omniglot", "train", tmp_path)


def numbered(classes=6, each=10):
    """Images that say which they are: the first pixel is the class, the second the number."""
    pixels = torch.zeros(classes * each, 1, 2, 2, dtype=torch.uint8)
    labels = torch.arange(classes).repeat_interleave(each)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = labels, torch.arange(each).repeat(classes)
    return Images(pixels, labels)


def test_an_episode_has_its_shots_and_queries_of_each_class_and_no_image_twice():
    taskset = ImageTaskset(numbered(), ways=4, shots=2, queries=3)
    x, y, x_query, y_query = taskset.sample()
    assert x.shape == (8, 1, 2, 2)
    assert x_query.shape == (12, 1, 2, 2)
    assert y.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert y_query.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    every = (torch.cat([x, x_query])[:, 0, 0] * 255).round().int()
    assert len(every.unique(dim=0)) == 20
    labels = torch.cat([y, y_query])
    assert all(len(every[labels == k, 0].unique()) == 1 for k in range(4))
    assert len(every[:, 0].unique()) == 4


def test_images_may_come_in_any_order():
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    mixed = Images(*(part[order] for part in numbered()))
    x, y, x_query, y_query = ImageTaskset(mixed, ways=4, shots=2, queries=3).sample()
    classes, labels = (torch.cat([x, x_query])[:, 0, 0, 0] * 255).round(), torch.cat([y, y_query])
    assert all(len(classes[labels == k].unique()) == 1 for k in range(4))
    assert len(classes.unique()) == 4
    with pytest.raises(ArgumentError, match="59 of them, but there are 60 inputs"):
        ImageTaskset(Images(mixed.pixels, mixed.labels[1:]), 4, 2, 3)


def test_data_of_any_kind_come_as_they_are():
    ids = torch.arange(60).unsqueeze(1).repeat(1, 4)
    labels = torch.arange(6).repeat_interleave(10)
    taskset = ClassTaskset(ids, labels, ways=3, shots=2, queries=4, seed=1)
    images = ImageTaskset(numbered(), ways=3, shots=2, queries=4, seed=1)
    task, same = taskset[7], images[7]
    assert task.x.dtype == torch.long
    assert task.x_query.shape == (12, 4)
    pixels = (same.x[:, 0, 0] * 255).round().long()
    assert torch.equal(task.x[:, 0], 10 * pixels[:, 0] + pixels[:, 1])
    assert torch.equal(taskset.with_shape(ways=5)[0].x, ClassTaskset(ids, labels, 5, 2, 4, seed=1)[0].x)


def test_classes_of_a_task_are_of_one_group():
    groups = [0, 1, 0, 1, 2, 1]
    for taskset in (
        ImageTaskset(numbered(), ways=2, shots=1, queries=1, groups=groups),
        ImageTaskset(numbered(), ways=3, shots=1, queries=1, groups=groups).with_shape(ways=2),
    ):
        found = [frozenset((taskset[i].x[:, 0, 0, 0] * 255).round().int().tolist()) for i in range(60)]
        assert set(found) == {frozenset(pair) for pair in ((0, 2), (1, 3), (1, 5), (3, 5))}
    task = OpenSetQueries(ImageTaskset(numbered(), 2, 1, 1, groups=groups))[0]  # unknown ones may be of any
    assert (task.y_query < 0).sum() == 2
    with pytest.raises(ArgumentError, match="no group has more than 3"):
        ImageTaskset(numbered(), ways=4, shots=1, queries=1, groups=groups)
    with pytest.raises(ArgumentError, match="groups has 2 entries"):
        ImageTaskset(numbered(), ways=4, shots=1, queries=1, groups=[0, 1])


def test_all_images_and_classes_come_alike():
    taskset = ImageTaskset(numbered(), ways=3, shots=1, queries=1)
    seen = torch.cat(
        [(torch.cat([t.x, t.x_query])[:, 0, 0] * 255).round().int() for t in (taskset[i] for i in range(600))]
    )
    counts = torch.bincount(seen[:, 0] * 10 + seen[:, 1])
    assert len(counts) == 60
    assert (counts - 60.0).abs().max() < 5 * 60**0.5


def test_a_task_is_the_same_whenever_it_is_asked_for():
    first, second = (ImageTaskset(numbered(), 3, 1, 2, seed=4) for _ in range(2))
    task = first[5]
    np.random.seed(0), torch.manual_seed(0)
    assert all(map(torch.equal, task, second[5]))
    assert not torch.equal(task.x, ImageTaskset(numbered(), 3, 1, 2, seed=5)[5].x)
    together = first.batch(3)
    assert together.x.shape == (3, 3, 1, 2, 2)
    assert torch.equal(together.x[2], second[2].x)
    assert torch.equal(first.sample().x, second[3].x)
    few = ImageTaskset(numbered(), 3, 1, 2, num_tasks=2)
    assert len(list(few)) == len(few) == 2
    assert torch.equal(few.batch(3).x[2], few[0].x)
    with pytest.raises(IndexError):
        few[2]


def test_a_class_is_turned_as_a_whole():
    pixels = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2).repeat(40, 1, 1, 1)
    taskset = ImageTaskset(Images(pixels, torch.arange(4).repeat_interleave(10)), 4, 2, 3, rotate=True)
    turns = set()
    for i in range(20):
        x, y, x_query, y_query = taskset[i]
        for k in range(4):
            own = torch.cat([x[y == k], x_query[y_query == k]]).flatten(1).unique(dim=0)
            assert len(own) == 1
            turns.add(tuple((own[0] * 255).round().int().tolist()))
    assert turns == {tuple(torch.rot90(pixels[0, 0], k).flatten().tolist()) for k in range(4)}


def test_the_three_splits_and_training_s_own_numbers(cifarfs, monkeypatch):
    tasksets = get_tasksets("cifarfs", ways=2, shots=1, queries=4, train_ways=3, train_queries=2, root=cifarfs, seed=1)
    assert tasksets.train.sample().x_query.shape == (6, 3, 32, 32)
    assert tasksets.test.sample().x_query.shape == (8, 3, 32, 32)
    assert len(tasksets.test) == 1000
    monkeypatch.setenv("L2L_NIW_DATA", str(cifarfs))
    again = get_tasksets("cifarfs", ways=2, shots=1, queries=4, train_ways=3, train_queries=2, seed=2)
    assert torch.equal(again.test[3].x, tasksets.test[3].x)
    assert not torch.equal(again.test[3].x, tasksets.validation[3].x)
    assert not torch.equal(again.train[3].x, tasksets.train[3].x)
    for split, taskset in tasksets._asdict().items():
        assert taskset.images.pixels.equal(load_images("cifarfs", split, cifarfs).pixels)
        assert not taskset.rotate
    own = {f"{split}_{name}": n for split, n in (("train", 1), ("validation", 2)) for name in ("shots", "queries")}
    other = get_tasksets("cifarfs", ways=2, shots=3, queries=3, validation_ways=3, root=cifarfs, **own)
    assert [len(taskset[0].x) for taskset in other] == [2, 6, 6]
    assert [len(taskset[0].x_query) for taskset in other] == [2, 6, 6]
    with pytest.raises(ArgumentError, match="cifarfs .validation.: ways is 4, but there are 3 classes"):
        get_tasksets("cifarfs", ways=4, train_ways=3, shots=1, queries=1, root=cifarfs)


def test_omniglot_s_characters_are_turned(tmp_path, monkeypatch):
    tasksets = get_tasksets("omniglot", ways=2, shots=1, queries=1, root=draw_omniglot(tmp_path, monkeypatch))
    assert all(taskset.rotate for taskset in tasksets)


def test_missing_data_are_named_with_their_remedy_and_nothing_is_touched(tmp_path, monkeypatch):
    for name in images.SOURCES:
        with pytest.raises(
            DataError, match=f"No {name} .*looked for .*{tmp_path.name}.*Either .*{tmp_path.name}.*or .*download=True"
        ):
            load_images(name, "train", tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match="L2L_NIW_DATA"):
        load_images("cifarfs", "train")
    with pytest.raises(ArgumentError, match="mini-imagenet"):
        load_images("mnist", "train", tmp_path)
    with pytest.raises(ArgumentError, match="validation"):
        load_images("cifarfs", "val", tmp_path)
    (tmp_path / "cifarfs.zip").write_bytes(b"half an archive")
    with pytest.raises(DataError, match="cifarfs.zip, which is there already"):
        load_images("cifarfs", "train", tmp_path, download=True)
    assert (tmp_path / "cifarfs.zip").read_bytes() == b"half an archive"


def test_data_that_cannot_be_read_are_named(cifarfs, tmp_path):
    folder = cifarfs / "cifarfs" / "processed"
    (folder / "train" / "zebra").mkdir()
    with pytest.raises(DataError, match="cifarfs .train. under .* cannot be read: There is no PNG in .*zebra.*PNGs"):
        load_images("cifarfs", "train", cifarfs)
    (folder / "val" / "bee" / "0.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="cifarfs .validation. .*bee/0.png"):
        load_images("cifarfs", "validation", cifarfs)
    draw(folder / "test", ["other"], 1, (16, 16, 3))
    with pytest.raises(DataError, match="other/0.png is of another size"):
        load_images("cifarfs", "test", cifarfs)
    (tmp_path / "fc100-png" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="There is no folder of a class in .*fc100-png/train"):
        load_images("fc100", "train", tmp_path)
    (tmp_path / "mini-imagenet-cache-test.pkl").write_bytes(pickle.dumps({"image_data": 3})[:-4])
    with pytest.raises(DataError, match="mini-imagenet .test. under .* cannot be read"):
        load_images("mini-imagenet", "test", tmp_path)
    (tmp_path / "tiered-imagenet").mkdir()
    (tmp_path / "tiered-imagenet" / "val_images_png.pkl").write_bytes(b"")
    with pytest.raises(DataError, match="looked for .*val_images_png.pkl and .*val_labels.pkl"):
        load_images("tiered-imagenet", "validation", tmp_path)
    with pytest.raises(DataError, match="list holds no image"):
        images.from_dataset([])


def test_a_download_is_learn2learn_s_and_only_on_demand(tmp_path, monkeypatch):
    def download(dataset, root, split, download=False):
        assert (dataset, split, download) == ("CIFARFS", "test", True)
        draw(root / "cifarfs" / "processed" / "test", ["a", "b"], 2, (32, 32, 3))

    monkeypatch.setattr(images, "learn2learn", download)
    assert len(load_images("cifarfs", "test", tmp_path / "new", download=True).labels) == 4


def test_a_download_that_fails_is_named_and_can_be_tried_again(tmp_path, monkeypatch):
    def download(dataset, root, split, download=False):
        (root / "tiered-imagenet").mkdir()
        raise ConnectionError("no route to host")

    monkeypatch.setattr(images, "learn2learn", download)
    with pytest.raises(DataError, match="tiered-imagenet .train. cannot be downloaded: no route to host.*zenodo"):
        load_images("tiered-imagenet", "train", tmp_path, download=True)

    def other(dataset, root, split, download=False):  # the empty folder does not keep it from being tried
        (root / "tiered-imagenet" / "train_labels.pkl").write_text("<html>")
        raise RuntimeError("File not found or corrupted")

    monkeypatch.setattr(images, "learn2learn", other)
    with pytest.raises(DataError, match="File not found or corrupted. Move away .*tiered-imagenet, try again"):
        load_images("tiered-imagenet", "train", tmp_path, download=True)
    assert (tmp_path / "tiered-imagenet" / "train_labels.pkl").read_text() == "<html>"


def test_a_data_set_with_classes_missing_is_told(tmp_path):
    draw(tmp_path / "fc100-png" / "val", [f"class{k}" for k in range(19)], 1, (32, 32, 3))
    with pytest.warns(UserWarning, match="fc100-png/val has 19 classes instead of 20"):
        load_images("fc100", "validation", tmp_path)
    draw(tmp_path / "fc100-png" / "test", [f"class{k}" for k in range(20)], 1, (32, 32, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_images("fc100", "test", tmp_path)


def test_a_broken_cache_is_named_and_not_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    draw_cifarfs(tmp_path / "data")
    (tmp_path / "home").write_text("no folder")
    with pytest.raises(NIWError, match="^[^ ]*home/hub/l2l_niw cannot be made: .* Set TORCH_HOME"):
        load_images("cifarfs", "train", tmp_path / "data")
    (tmp_path / "home").unlink()
    before = load_images("cifarfs", "train", tmp_path / "data")
    images._read.cache_clear()
    (path,) = (tmp_path / "home" / "hub" / "l2l_niw").glob("*.safetensors")
    whole = path.read_bytes()
    path.unlink()  # tensors are of the old file still
    path.write_bytes(whole[:100])
    with pytest.raises(NIWError, match="safetensors cannot be read: .* Delete it, and it is computed again"):
        load_images("cifarfs", "train", tmp_path / "data")
    path.unlink()
    assert torch.equal(load_images("cifarfs", "train", tmp_path / "data").pixels, before.pixels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ways": 7}, "ways is 7, but there are 6 classes"),
        ({"queries": 10}, "shots . queries is 11, but a class has 10"),
        ({"shots": 0}, "shots must be"),
        ({"num_tasks": 0}, "num_tasks"),
        ({"seed": -1}, "seed must be"),
        ({"images": Images(numbered().pixels / 255, numbered().labels)}, "pixels in bytes"),
        ({"images": Images(numbered().pixels, numbered().labels - 1)}, "labels has -1"),
    ],
)
def test_numbers_that_the_images_cannot_give_are_named(change, message):
    with pytest.raises(ArgumentError, match=message):
        ImageTaskset(**{"images": numbered(), "ways": 3, "shots": 1, "queries": 2, **change})
