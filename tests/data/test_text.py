"""Texts as few-shot tasks: every class in one split, every text in its class, and files that are not as they should."""

import json
import lzma
from collections import Counter
from pathlib import Path

import pytest
import torch

from l2l_niw.data import MappedTaskset, OpenSetQueries, SineLine, Texts, clinc150, get_text_tasksets, read_csv
from l2l_niw.errors import ArgumentError, DataError

SHARED = Path(__file__).parents[3] / "shared" / "data"


def drawn(domains=6, each=5, texts=8, unknown=9):
    """Texts that say which they are."""
    labels = [f"{d}-{i}" for d in range(domains) for i in range(each) for _ in range(texts)]
    return Texts(
        [f"{label}-{n % texts}" for n, label in enumerate(labels)],
        labels,
        {label: label[0] for label in labels},
        [f"9-9-{n}" for n in range(unknown)],
    )


def tokenise(texts):
    """Domain, intent and number of a text."""
    return torch.tensor([[int(part) for part in text.split("-")] for text in texts])


def classes(ids):
    return {tuple(own) for own in ids[:, :2].tolist()}


def test_no_class_is_in_two_splits_and_every_task_is_of_its_own():
    tasksets = get_text_tasksets(drawn(), tokenise, ways=4, shots=2, queries=3, test_tasks=60)
    seen = []
    for taskset in tasksets[:3]:
        tasks = [taskset[i] for i in range(60)]
        for x, y, x_query, y_query in tasks:
            assert x.shape == (8, 3)
            assert x_query.shape == (12, 3)
            rows = torch.cat([x, x_query])
            assert len(rows.unique(dim=0)) == 20
            labels = torch.cat([y, y_query])
            assert all(len(classes(rows[labels == k])) == 1 for k in range(4))
            assert len(classes(rows)) == 4
        seen.append(classes(torch.cat([task.x for task in tasks])))
    assert [len(own) for own in seen] == [10, 10, 10]
    assert len(set.union(*seen)) == 30


def test_classes_of_a_task_are_of_one_group():
    tasksets = get_text_tasksets(drawn(), tokenise, ways=4, shots=1, queries=1, one_group=True, test_tasks=40)
    groups = []
    for taskset in tasksets[:3]:
        own = [classes(taskset[i].x) for i in range(40)]
        assert all(len({group for group, _ in found}) == 1 for found in own)
        groups.append({group for found in own for group, _ in found})
    assert [len(own) for own in groups] == [2, 2, 2]
    assert len(set.union(*groups)) == 6
    with pytest.raises(ArgumentError, match="no group has more than 5 classes"):
        get_text_tasksets(drawn(), tokenise, ways=6, one_group=True, queries=1)


def test_seeds_change_training_tasks_alone():
    first, second, other = (get_text_tasksets(drawn(), tokenise, 4, 1, 2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.train[3].x, second.train[3].x)
    assert not torch.equal(first.train[3].x, other.train[3].x)
    assert torch.equal(first.test[3].x, other.test[3].x)
    assert torch.equal(first.test_unknown, other.test_unknown)


def test_texts_of_no_class_are_queries_to_be_told_apart():
    tasksets = get_text_tasksets(drawn(), tokenise, ways=2, shots=1, queries=3, test_tasks=5)
    assert len(tasksets.validation_unknown) == 3
    assert len(tasksets.test_unknown) == 6
    both = torch.cat(tasksets[3:])
    assert sorted(both[:, 2].tolist()) == list(range(9))
    for task in OpenSetQueries(tasksets.test, unknown=tasksets.test_unknown):
        assert (task.y_query < 0).sum() == 6
        assert (task.x_query[task.y_query < 0][:, 0] == 9).all()


def test_inputs_are_gone_over_by_a_function():
    tasksets, calls = get_text_tasksets(drawn(), tokenise, ways=4, shots=1, queries=2, test_tasks=3), []

    def features(ids):
        calls.append(len(ids))
        return torch.cat([ids.float(), ids.float().square()], 1)

    mapped = MappedTaskset(OpenSetQueries(tasksets.test, unknown=tasksets.test_unknown, classes=1), features)
    assert len(mapped) == 3
    for task, own in zip(mapped, OpenSetQueries(tasksets.test, unknown=tasksets.test_unknown, classes=1)):
        assert torch.equal(task.x, torch.cat([own.x, own.x.square()], 1).float())
        assert torch.equal(task.x_query[:, :3], own.x_query.float())
        assert torch.equal(task.y_query, own.y_query)
    assert calls == [4 + 8 + 2] * 3
    with pytest.raises(ArgumentError, match="taskset must be"):
        MappedTaskset(SineLine(), features)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_tables_are_read(tmp_path, separator):
    rows = [("question", "intent", "area"), ("what is left?", "balance", "money"), ('say "hi"', "greet", "talk"),
            ("two\nlines", "greet", "talk"), ("nonsense", "none", "")]  # fmt: skip
    quoted = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row] for row in rows]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(separator.join(row) for row in quoted[:-1]) + "\n", encoding="utf-8-sig")
    found = read_csv(path, text="question", label="intent", group="area")
    assert found.texts == ["what is left?", 'say "hi"', "two\nlines"]
    assert found.labels == ["balance", "greet", "greet"]
    assert found.groups == {"balance": "money", "greet": "talk"}
    path.write_text("\n".join(separator.join(row[:2]) for row in quoted))
    found = read_csv(path, text="question", label="intent", unknown="none")
    assert found.unknown == ["nonsense"]
    assert set(found.groups) == {"balance", "greet"}


@pytest.mark.parametrize(("content", "error", "message"), [
    (b"a,b\n1,2\n", ArgumentError, "has no column text, label; its header is a, b"),
    (b"text,label\nhello,\n", ArgumentError, "line 2: label is empty"),
    (b"text,label\nhello\n", ArgumentError, "line 2: label is empty"),
    (b"text,label\n", DataError, "has no texts"),
    (b"", ArgumentError, "has no column"),
    ("text,label\ngr\u00fc\u00df,a".encode("latin-1"), ArgumentError, "is not in UTF-8"),
    (b"text,label,group\na,b,c\nd,b,e\n", ArgumentError, "line 3: label b has group e, and c in a line before"),
])  # fmt: skip
def test_tables_that_cannot_be_read_are_named(tmp_path, content, error, message):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(error, match=message):
        read_csv(path, group="group" if b"group" in content else None)
    with pytest.raises(DataError, match="there is no file"):
        read_csv(tmp_path / "other.csv")


def test_numbers_that_the_texts_cannot_give_are_named():
    for options, message in (
        ({"ways": 11}, r"texts \(train\): ways is 11, but there are 10 classes"),
        ({"queries": 8}, "shots . queries is 9, but a class has 8"),
        ({"seed": -1}, "seed must be"),
        ({"test_tasks": 0}, "test_tasks must be"),
    ):
        with pytest.raises(ArgumentError, match=message):
            get_text_tasksets(drawn(), tokenise, **{"ways": 2, "queries": 2, **options})
    with pytest.raises(ArgumentError, match="2 groups, fewer than splits"):
        get_text_tasksets(drawn(domains=2), tokenise, ways=2, queries=2, one_group=True)


def written(root, **change):
    """A small CLINC150."""
    pairs = [[f"{d}-{i}-{n}", f"intent {d}-{i}"] for d in range(3) for i in range(2) for n in range(4)]
    data = {"train": pairs[::2], "val": pairs[1::4], "test": pairs[3::4]}
    data |= {f"oos_{split}": [[f"9-9-{n}", "oos"]] for n, split in enumerate(("train", "val", "test"))}
    (root / "clinc150").mkdir()
    (root / "clinc150/domains.json").write_text(
        json.dumps({f"domain {d}": [f"intent {d}-{i}" for i in range(2)] for d in range(3)})
    )
    return json.dumps({**data, **change})


@pytest.mark.parametrize("packed", [False, True])
def test_clinc150_is_read_from_its_files(tmp_path, packed):
    text = written(tmp_path)
    path = tmp_path / "clinc150" / ("data_full.json.xz" if packed else "data_full.json")
    path.write_bytes(lzma.compress(text.encode()) if packed else text.encode())
    found = clinc150(tmp_path)
    assert Counter(found.labels) == {f"intent {d}-{i}": 4 for d in range(3) for i in range(2)}
    assert sorted(found.unknown) == ["9-9-0", "9-9-1", "9-9-2"]
    assert found.groups["intent 2-1"] == "domain 2"
    assert all(label == f"intent {text[:3]}" for text, label in zip(found.texts, found.labels))


def test_a_clinc150_that_is_not_whole_is_named(tmp_path):
    with pytest.raises(DataError, match=r"looked for .*data_full\.json or data_full\.json\.xz"):
        clinc150(tmp_path)
    path = tmp_path / "clinc150" / "data_full.json"
    text = written(tmp_path)
    for content in (text[:-20], written_without(text, "val"), "[]"):
        path.write_text(content)
        with pytest.raises(DataError, match="cannot be read"):
            clinc150(tmp_path)
    path.unlink()
    path.with_suffix(".json.xz").write_bytes(lzma.compress(text.encode())[:-30])
    with pytest.raises(DataError, match="cannot be read"):
        clinc150(tmp_path)


def written_without(text, key):
    return json.dumps({name: value for name, value in json.loads(text).items() if name != key})


@pytest.mark.skipif(not (SHARED / "clinc150").is_dir(), reason="needs CLINC150 in ../shared/data")
def test_clinc150_has_its_intents_and_domains():
    found = clinc150(SHARED)
    assert set(Counter(found.labels).values()) == {150}
    assert len(found.groups) == 150
    assert set(Counter(found.groups.values()).values()) == {15}
    assert len(found.unknown) == 1200
