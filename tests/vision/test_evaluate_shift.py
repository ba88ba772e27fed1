"""Trained runs under shift, and the part of the report that they make."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from drawings import SMALL, draw, draw_cifarfs

from l2l_niw.cli import main
from l2l_niw.data import images
from l2l_niw.errors import ArgumentError, CheckpointError
from l2l_niw.reports import image_shift, pack, report
from l2l_niw.vision import evaluate, runs, train
from l2l_niw.vision.shift import SHIFTS, evaluate_shift, shift_scores


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = draw_cifarfs(tmp_path_factory.mktemp("data"), classes=7, each=9)
    for seed, mode in enumerate(("train", "val", "test"), start=10):
        draw(root / "fc100-png" / mode, [f"other{k}" for k in range(4)], 9, (32, 32, 3), seed)
    images._read.cache_clear()
    return root


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """An empty cache of torch's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))
        yield


def trained(method, folder, data):
    train(replace(SMALL, method=method, pretraining=1, batchnorm="running"), folder, data)
    evaluate(folder, data)
    return folder


def test_queries_of_unknown_classes_are_told_apart_and_not_scored_otherwise():
    known = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]).double()
    unknown = torch.tensor([[0.55, 0.45]]).double()
    found = torch.cat([known, unknown]).unsqueeze(0)
    scores = shift_scores(found, torch.tensor([[0, 1, 1, -1]]), 2.0, threshold=0.3)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores["nll"] == pytest.approx(-(math.log(0.9) + math.log(0.8) + math.log(0.4)) / 3)
    assert scores["auroc"] == 1.0  # every known query is surer
    assert scores["coverage"] == pytest.approx(2 / 3)  # the third has no label with 0.7
    assert scores["set_size"] == pytest.approx(2 / 3)
    assert scores["aurc"] == pytest.approx((0 + 0 + 1 / 3) / 3)  # the wrong one is answered last
    assert scores["ece_ts"] != scores["ece"]
    closed = shift_scores(found[:, :3], torch.tensor([[0, 1, 1]]), None, threshold=0.3)
    assert closed["auroc"] is None
    assert closed["ece_ts"] is None
    assert closed["nll"] == pytest.approx(scores["nll"])


def test_a_run_is_scored_under_every_shift(data, tmp_path, capsys):
    found = evaluate_shift(trained("protonet", tmp_path, data), data)
    assert list(found) == list(SHIFTS)
    assert json.loads((tmp_path / "shift.json").read_text()) == found
    training = runs.trained(tmp_path)
    probabilities, y = runs.predictions(training.method, runs.tasksets_of(training.config, data).test, 12)
    assert found["in domain"]["accuracy"] == pytest.approx((probabilities.argmax(-1) == y).double().mean().item())
    assert found["open set"]["accuracy"] == found["in domain"]["accuracy"]  # of the same queries
    assert [name for name, scores in found.items() if scores["auroc"] is not None] == ["open set"]
    assert len({scores["nll"] for scores in found.values()}) == len(found) - 1
    assert found["more ways"]["nll"] > found["in domain"]["nll"]  # twice the classes
    assert main(["shift", str(tmp_path), "--data", str(data)]) == 0
    assert "open set" in capsys.readouterr().out


def test_a_linear_head_has_no_more_ways_and_a_head_has(data, tmp_path):
    for name, fixed in (("maml", True), ("niw-qda", False), ("metaqda-4", False)):
        training = runs.Training(runs.build(replace(SMALL, method=name)), runs.complete(replace(SMALL, method=name)))
        assert training.method.fixed_ways == fixed
    found = evaluate_shift(trained("fomaml", tmp_path, data), data)
    assert set(SHIFTS) - set(found) == {"more ways"}


def test_other_classes_are_those_that_training_has_no_image_of(data, tmp_path):
    root = draw_cifarfs(tmp_path / "data", classes=5, each=9)
    for mode in ("train", "val", "test"):
        draw(root / "fc100-png" / mode, [f"other{k}" for k in range(4)], 9, (32, 32, 3), seed=7)
    seen = root / "cifarfs" / "processed" / "train" / "class2"
    shutil.copytree(seen, root / "fc100-png" / "test" / "another1")
    images._read.cache_clear()
    found = SHIFTS["other classes"](SMALL, runs.tasksets_of(SMALL, root).test, root)
    every = runs.tasksets_of(replace(SMALL, dataset="fc100"), root).test
    assert len(every.images.labels.unique()) == 5
    assert found.images.labels.bincount().tolist() == [9] * 4
    assert torch.equal(found.images.pixels, every.images.pixels[every.images.labels > 0])
    with pytest.raises(ArgumentError, match="fc100 has 4 new classes, and ways is 5"):
        SHIFTS["other classes"](SMALL, runs.tasksets_of(replace(SMALL, ways=5), root).test, root)


def test_a_data_set_without_another_is_named(data):
    tasks = runs.tasksets_of(SMALL, data).test
    with pytest.raises(ArgumentError, match="dataset: omniglot has no other set of classes"):
        SHIFTS["other classes"](replace(SMALL, dataset="omniglot"), tasks, data)


def test_the_report_has_a_table_and_a_plot_from_runs_or_their_packed_file(data, tmp_path):
    for name in ("protonet", "niw-ncc", "fomaml"):
        folder = trained(name, tmp_path / "runs" / f"{name}-0", data)
        evaluate_shift(folder, data)
    text = report(tmp_path)
    rows = [line for line in text.partition("## Under shift")[2].splitlines() if line.startswith("| NIW, nearest")]
    assert len(rows) == 2  # scores, and what NIW's ECE is of its baseline's
    own, theirs = (
        json.loads((tmp_path / "runs" / f"{n}-0" / "shift.json").read_text()) for n in ("niw-ncc", "protonet")
    )
    ratio = own["more shots"]["ece"] / theirs["more shots"]["ece"]
    assert rows[1].split(" | ")[-1] == f"{ratio:.2f} |"
    blur = sum(own[f"blur {k}"]["accuracy"] for k in (1, 3, 5)) / 3
    assert f"| {100 * blur:.1f}, " in rows[0]
    assert (tmp_path / "shift.png").stat().st_size > 10_000
    pack(tmp_path)
    for path in (tmp_path / "runs").glob("*/shift.json"):
        path.unlink()
    assert report(tmp_path) == text
    (tmp_path / "shift.jsonl").write_text('{"method": "protonet", "seed": 0}\n')
    with pytest.raises(CheckpointError, match="shift.jsonl lacks scores"):
        image_shift.load(tmp_path)
