"""Loaders of the original files, on small ones of the same structure."""

import pickle

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from l2l_niw.data.pose import ViewTaskset, load_distractor, load_pascal1d, load_shapenet1d, load_shapenet2d
from l2l_niw.errors import ArgumentError, DataError

OBJECTS, VIEWS, SIZE = 3, 6, 8
random = np.random.default_rng(0)


def dump(path, thing, protocol=2):
    path.write_bytes(pickle.dumps(thing, protocol))


def azimuths(objects=OBJECTS, flat=False, dtype=np.uint8):
    """Images, and labels whose last column is a part of a turn."""
    images = random.integers(256, size=(objects, VIEWS, SIZE, SIZE, 1)).astype(dtype)
    return images.reshape(objects, VIEWS, -1) if flat else images, random.uniform(size=(objects, VIEWS, 3))


def quaternions(objects=OBJECTS):
    """A dict of images with a mask in the fourth channel, objects mixed up."""
    items = random.permutation(np.repeat(np.arange(objects), VIEWS))
    images = random.integers(256, size=(len(items), SIZE, SIZE, 4)).astype(np.float32) / 255
    images[..., 3] = random.integers(2, size=images.shape[:3])
    return {"images": images, "item_indices": items, "Q": Rotation.random(len(items), random_state=1).as_quat()}


def positions(objects=5):
    """Objects of views of an image, two numbers and a centre."""
    found = np.empty((objects, VIEWS, 4), object)
    for k in range(objects):
        for view in range(VIEWS):
            image = random.integers(256, size=(SIZE, SIZE, 1)) / 255
            found[k, view] = None
            found[k, view, 0], found[k, view, 1], found[k, view, 2] = image, k, view
            found[k, view, 3] = random.uniform(0, SIZE, 2)
    return found


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("as_lists", [False, True])
def test_pascal1d(tmp_path, flat, as_lists):
    written = {}
    for name, objects in (("train", 4), ("val", 2)):
        images, labels = written[name] = azimuths(objects, flat)
        pair = ([list(own) for own in images], [list(own) for own in labels]) if as_lists else (images, labels)
        dump(tmp_path / f"{name}_data_ins.pkl", pair, 4 if flat else 2)
    train, intra, cross = load_pascal1d(tmp_path)
    assert cross is None
    for data, (images, labels) in ((train, written["train"]), (intra, written["val"])):
        assert data.kind == "scaled"
        np.testing.assert_array_equal(data.images.flatten(2), images.reshape(len(images), VIEWS, -1))
        assert data.images.shape[2:] == (1, SIZE, SIZE)
        np.testing.assert_allclose(data.targets[..., 0], 10 * labels[..., -1], rtol=1e-6)
    x, y, x_query, y_query = ViewTaskset(train, shots=2, queries=4).batch(3)
    assert x.shape == (3, 2, 1, SIZE, SIZE)
    assert y_query.shape == (3, 4, 1)


@pytest.mark.parametrize("amount", ["small", "large"])
def test_shapenet1d(tmp_path, amount):
    written = [azimuths(dtype=dtype) for dtype in (np.uint8, np.float32, np.int64)]
    for name, pair in zip((f"train_data_{amount}", "val_data", "test_data"), written):
        dump(tmp_path / f"{name}.pkl", list(pair))
    for data, (images, labels) in zip(load_shapenet1d(tmp_path, amount), written):
        assert data.kind == "vector"
        assert data.images.dtype == torch.uint8
        np.testing.assert_array_equal(data.images[:, :, 0], images[..., 0])
        angle = 2 * np.pi * labels[..., -1]
        np.testing.assert_allclose(data.targets, np.stack([np.sin(angle), np.cos(angle)], -1), atol=1e-6)
    with pytest.raises(ArgumentError, match="amount must be"):
        load_shapenet1d(tmp_path, "huge")


@pytest.mark.parametrize("cut_out", [False, True])
def test_shapenet2d(tmp_path, cut_out):
    written = [quaternions() for _ in range(3)]
    for name, content in zip(("train", "val", "test"), written):
        dump(tmp_path / f"shapenet3d_azi180ele30_{name}.pkl", content, 3)
    found = load_shapenet2d(tmp_path, cut_out)
    for data, content in zip(found, written):
        for k in range(OBJECTS):
            own = np.flatnonzero(content["item_indices"] == k)
            np.testing.assert_allclose(data.targets[k], content["Q"][own], rtol=1e-6)
            pixels = np.rint(255 * content["images"][own, ..., :3])
            mask = content["images"][own, ..., 3] < 1
            if data.alpha is not None:
                np.testing.assert_array_equal(data.alpha[k] / 255, mask)
                pixels = pixels * mask[..., None]
            np.testing.assert_array_equal(data.images[k].permute(0, 2, 3, 1), pixels)
    assert [data.alpha is not None for data in found] == [cut_out, False, False]
    task = ViewTaskset(found.train, 2, 4, randomised=cut_out)[0]
    assert task.x.shape == (2, 3, SIZE, SIZE)


def test_distractor(tmp_path):
    written = {name: positions(objects) for name, objects in (("a", 4), ("b", 6), ("c", 2))}
    for name, content in written.items():
        np.save(tmp_path / f"{name}_multi.npy", content, allow_pickle=True)
    train, intra, cross = load_distractor(tmp_path, ("a", "b"), ("c",))
    assert [len(data.images) for data in (train, intra, cross)] == [8, 2, 2]
    expected = np.array([[255 - np.rint(255 * view[0][..., 0]) for view in item] for item in written["c"]])
    np.testing.assert_array_equal(cross.images[:, :, 0], expected)
    np.testing.assert_allclose(cross.targets, [[view[3] for view in item] for item in written["c"]], rtol=1e-6)
    known = {tuple(np.float32(item[0][3])) for name in "ab" for item in written[name]}
    assert {tuple(own[0].numpy()) for data in (train, intra) for own in data.targets} == known
    again = load_distractor(tmp_path, ("a", "b"), ("c",))
    assert torch.equal(again.train.images, train.images)
    assert ViewTaskset(train, (1, 3), 3).batch(2).y_query.shape == (2, 3, 2)
    with pytest.raises(ArgumentError, match="must be different categories"):
        load_distractor(tmp_path, ("a", "b"), ("b",))


@pytest.mark.parametrize(("change", "message"), [
    (lambda x, y: (x, y, y), "too many values"),
    (lambda x, y: (x[:2], y), r"images \(2, 6, 8, 8, 1\) and labels \(3, 6, 3\) are not"),
    (lambda x, y: (x, y[..., 0]), "are not"),
    (lambda x, y: (x, y[..., :0]), "are not"),
    (lambda x, y: (x, y + 0.5), "azimuths are not all from 0 to 1"),
    (lambda x, y: (x, y * np.nan), "azimuths are not all from 0 to 1"),
    (lambda x, y: (x.astype(float) - 1, y), "images are not all from 0 to 255"),
    (lambda x, y: (x / 255.0, y), "but to 1"),
    (lambda x, y: (x[:, :, 1:], y), "not square"),
    (lambda x, y: (x[:0], y[:0]), "images are not all"),
    (lambda x, y: {"x": x, "y": y}, "a dict where a list should be"),
    (lambda x, y: (x, np.array([["a"]])), "not of numbers"),
    (lambda x, y: (x, np.array([[None]])), "a NoneType where"),
])  # fmt: skip
def test_azimuths_that_are_not_as_they_should_be_are_named(tmp_path, change, message):
    for name in ("train", "val"):
        dump(tmp_path / f"{name}_data_ins.pkl", change(*azimuths()))
    with pytest.raises(DataError, match=rf"train_data_ins\.pkl.*{message}.*meta_learning_without_memorization"):
        load_pascal1d(tmp_path)


@pytest.mark.parametrize(("change", "message"), [
    ({"Q": None}, "a NoneType where"),
    ({"Q": np.ones((OBJECTS * VIEWS, 4))}, "not unit quaternions"),
    ({"Q": np.ones((3, 4)) / 2}, "not unit quaternions"),
    ({"item_indices": np.zeros(3)}, "are not"),
    ({"item_indices": np.r_[0, 0, np.arange(2, OBJECTS * VIEWS)]}, "differ in their numbers of views"),
    ({"images": 255 * np.ones((OBJECTS * VIEWS, 8, 8, 4))}, "images are not all from 0 to 1"),
    ({"images": np.ones((OBJECTS * VIEWS, 8, 8))}, "are not"),
    ({"images": np.ones((OBJECTS * VIEWS, 8, 8, 3))}, "no fourth channel"),
])  # fmt: skip
def test_quaternions_that_are_not_as_they_should_be_are_named(tmp_path, change, message):
    path = tmp_path / "shapenet3d_azi180ele30_train.pkl"
    dump(path, {**quaternions(), **change})
    with pytest.raises(DataError, match=rf"azi180ele30_train\.pkl.*{message}.*ShapeNet3D_azi180ele30\.tar\.xz"):
        load_shapenet2d(tmp_path, cut_out=True)
    content = quaternions()
    del content["Q"]
    dump(path, content)
    with pytest.raises(DataError, match="is not as it should be: 'Q'"):
        load_shapenet2d(tmp_path)


def test_positions_that_are_not_as_they_should_be_are_named(tmp_path):
    def changed(field, value):
        content = positions()
        content[1, 2, field] = value
        return content

    for content, message in (
        (changed(0, np.zeros((3, 3))), "differ|shape"),
        (changed(0, 2 * np.ones((SIZE, SIZE, 1))), "images are not all from 0 to 1"),
        (changed(3, np.array([1.0, SIZE + 1])), f"centres are not all from 0 to {SIZE}"),
        (changed(3, np.ones(3)), "shape"),
        (positions()[..., :3], "out of range|out of bounds"),
        (positions()[0, 0], "where a list should be"),
    ):
        np.save(tmp_path / "a_multi.npy", content, allow_pickle=True)
        with pytest.raises(DataError, match=rf"a_multi\.npy.*({message}).*distractor\.tar\.xz"):
            load_distractor(tmp_path, ("a",), ("b",))


@pytest.mark.parametrize("load", [load_pascal1d, load_shapenet1d, load_shapenet2d, load_distractor])
def test_a_file_that_is_not_there_is_named(tmp_path, load):
    with pytest.raises(DataError, match=rf"There is no file {tmp_path}/\w*(train|02691156)\w*\.(pkl|npy)\. (Get|Make)"):
        load(tmp_path)
