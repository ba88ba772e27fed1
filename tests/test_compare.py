"""Comparisons of image classifiers, their reports, and the command line, on drawn data."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawings import SMALL, draw_cifarfs

from l2l_niw.__main__ import main
from l2l_niw.errors import ArgumentError, NIWError
from l2l_niw.reports import report
from l2l_niw.reports.images import interval, load
from l2l_niw.vision import evaluate, train
from l2l_niw.vision.compare import compare

LINE = [
    f"--{name}={value}"
    for name, value in {
        "ways": 3, "queries": 2, "train-queries": 2, "filters": 4, "iterations": 2, "meta-batch": 1, "test-tasks": 12,
        "validation-tasks": 2,
    }.items()
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_cifarfs(tmp_path_factory.mktemp("data"))


def test_a_comparison_reports_what_its_runs_found(data, tmp_path, capsys):
    arguments = [*LINE, "--validations=1", "--methods", "protonet", "niw-ncc", "--seeds", "0", "1"]
    arguments += ["--data", str(data), "--out", str(tmp_path), "--jobs", "2"]
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"niw-ncc": {"inner_lr": 0.02, "steps": 1}}))
    assert main(["compare", *arguments, "--settings", str(settings)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "| ProtoNet | 2 |" in text
    assert "inner_lr 0.02, steps 1" in text
    found = load(tmp_path)
    mean = np.mean([run.metrics["accuracy"] for run in found["niw-ncc"]])
    assert interval(found["niw-ncc"]).mean == pytest.approx(mean)
    twin = np.mean([run.metrics["accuracy"] for run in found["protonet"]])
    assert interval(found["niw-ncc"], found["protonet"]).mean == pytest.approx(mean - twin)
    assert f"{100 * mean:.2f} (" in text
    for path in tmp_path.glob("runs/*/tasks.npz"):
        path.unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == text
    assert (tmp_path / "curves.png").exists()
    assert (tmp_path / "reliability.png").exists()


def test_a_comparison_does_not_run_again_what_is_done(data, tmp_path, monkeypatch):
    config = replace(SMALL, method="protonet")
    own = tmp_path / "runs" / "protonet-0"
    train(config, own, data)
    evaluate(own, data)
    asked = []
    monkeypatch.setattr("subprocess.run", lambda line, **k: asked.append(line) or argparse.Namespace(returncode=0))
    compare(SMALL, tmp_path, ["protonet"], [0, 1], data)
    assert {line[-1] for line in asked} == {str(tmp_path / "runs" / "protonet-1")}


def test_a_run_that_fails_stops_no_other_and_is_named(data, tmp_path, monkeypatch):
    asked = []

    def run(line, **options):
        asked.append(line[-1])
        return argparse.Namespace(returncode=int("fomaml" in line[-1]), stderr="it diverged")

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(NIWError, match="it diverged"):
        compare(SMALL, tmp_path, ["fomaml", "maml"], [0, 1], data)
    assert [Path(folder).name for folder in asked] == ["fomaml-0", "maml-0", "maml-0", "fomaml-1", "maml-1", "maml-1"]


def test_settings_and_seeds_are_looked_at_first(data, tmp_path):
    for change, message in (
        ({"settings": {"maml": {"iterations": 3}}}, "settings of maml may be lr"),
        ({"settings": {"svm": {}}}, "got 'svm'"),
        ({"seeds": [0, 0]}, "seeds must differ"),
        ({"methods": ["svm"]}, "got 'svm'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            compare(SMALL, tmp_path, **{"methods": ["maml"], "root": data, **change})
    (tmp_path / "settings.json").write_text("{")
    assert main(["compare", "--settings", str(tmp_path / "settings.json"), "--out", str(tmp_path)]) == 1
    assert not (tmp_path / "runs").exists()


def test_runs_of_unequal_budgets_are_no_table(data, tmp_path):
    for name, iterations in (("protonet", 2), ("ridge", 3)):
        folder = tmp_path / "runs" / f"{name}-0"
        train(replace(SMALL, method=name, iterations=iterations, validations=1), folder, data)
        evaluate(folder, data)
    with pytest.raises(ArgumentError, match="iterations is 2 of protonet-0, but 3 of ridge-0"):
        report(tmp_path)


def test_the_command_line_trains_tests_and_names_what_is_wrong(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("L2L_NIW_DATA", str(data))
    arguments = ["--method=protonet", *LINE]
    out = str(tmp_path / "run")
    assert main(["train", *arguments, "--out", out]) == 0
    assert main(["test", out]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert main(["test", str(tmp_path)]) == 1
    assert "no config.json" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 1
    assert "holds no results" in capsys.readouterr().err
    assert main(["train", *arguments, "--dataset", "fc100", "--out", str(tmp_path / "other")]) == 1
    assert "No fc100 (train): looked for" in capsys.readouterr().err


def test_sine_line_s_report_is_the_same_command_s(tmp_path):
    run = {"row": "ridge", "title": "RidgeNet", "twin": None, "seed": 0, "budget": 10, "batch": 20, "test_tasks": 5}
    run |= {"mse": 0.5, "nll": 1.0, "r_ece": 0.1, "reliability": [0.5, 1.0], "curve": [1.0], "seconds": 1.0}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ridge-0.json").write_text(json.dumps({**run, "parameters": 3, "machine": "here"}))
    assert "| RidgeNet |" in report(tmp_path)
