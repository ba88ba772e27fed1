"""Comparisons of image classifiers, their reports, and the command line, on drawn data."""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drawings import SMALL, draw_cifarfs

from l2l_niw.__main__ import main
from l2l_niw.metrics.calibration import reliability
from l2l_niw.errors import ArgumentError, CheckpointError, DataError, NIWError
from l2l_niw.reports import report
from l2l_niw.reports.image_runs import Run, load
from l2l_niw.reports.images import differences, interval, intervals, mean_and_error, pairs, pooled
from l2l_niw.vision import evaluate, train
from l2l_niw.vision.compare import DIVERGED, compare

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


@pytest.mark.slow
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
    baseline = np.mean([run.metrics["accuracy"] for run in found["protonet"]])
    assert interval(found["niw-ncc"], found["protonet"]).mean == pytest.approx(mean - baseline)
    assert f"{100 * mean:.2f} (" in text
    (line,) = [line for line in text.splitlines() if "(its baseline)" in line]
    assert line.startswith(f"| NIW, nearest centroid | ProtoNet (its baseline) | 2 | {100 * (mean - baseline):+.2f} (")
    nll = [np.mean([run.metrics["nll"] for run in found[name]]) for name in ("niw-ncc", "protonet")]
    assert f" | {nll[0] - nll[1]:+.4f} (" in line
    for path in tmp_path.glob("runs/*/tasks.npz"):
        path.unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == text
    assert (tmp_path / "curves.png").exists()
    assert (tmp_path / "reliability.png").exists()


def test_niw_is_compared_with_its_baselines_and_its_best_on_validation_tasks_with_all_on_seeds_that_both_have(tmp_path):
    def run(method, seed, ece, validation_nll, accuracy):
        metrics = {"accuracy": accuracy, "ece": ece, "ece_ts": None}
        tasks = {"accuracy": np.array([accuracy, accuracy + seed]), "nll": np.ones(2)}
        config = replace(SMALL, method=method, seed=seed)
        return Run(tmp_path, config, metrics, [{"validation_nll": validation_nll}], tasks)

    def runs(method, seeds, *scores):
        return [run(method, seed, ece, *scores) for seed, ece in zip(seeds, (0.1, 0.3))]

    methods = {
        "maml": runs("maml", [0, 1], 1.0, 0.4),
        "protonet": runs("protonet", [1, 2], 1.0, 0.5),
        "ridge": runs("ridge", [3], 1.0, 0.5),
        "niw": runs("niw", [0, 1], 0.9, 0.6),
        "niw-ncc": runs("niw-ncc", [0, 1], 1.1, 0.7),  # the most accurate on test tasks, which must not matter
    }
    found = pairs(methods)
    seeds = {pair: [[run.config.seed for run in part] for part in both] for pair, both in found.items()}
    assert seeds == {
        ("niw", "maml"): [[0, 1], [0, 1]],
        ("niw-ncc", "protonet"): [[1], [1]],
        ("niw", "protonet"): [[1], [1]],
    }
    text = differences(methods, intervals(tmp_path, methods))
    assert "| NIW, nearest centroid | ProtoNet (its baseline) | 1 | +20.00 (+20.00 to +20.00) | " in text
    assert text.splitlines()[3].endswith(" | 3.00 |  |")  # 0.3 against 0.1, and no temperature


def test_a_comparison_does_not_run_again_what_is_done(data, tmp_path, monkeypatch):
    config = replace(SMALL, method="protonet", inner_lr=None, steps=None, samples=None)
    own = tmp_path / "runs" / "protonet-0"
    train(config, own, data)
    evaluate(own, data)
    asked = []
    monkeypatch.setattr("subprocess.run", lambda line, **k: asked.append(line) or argparse.Namespace(returncode=0))
    compare(config, tmp_path, ["protonet"], [0, 1], data)
    assert {line[-1] for line in asked} == {str(tmp_path / "runs" / "protonet-1")}


def test_a_run_that_fails_stops_no_other_and_is_named(data, tmp_path, monkeypatch):
    asked = []

    def run(line, **options):
        asked.append(line[-1])
        return argparse.Namespace(returncode=DIVERGED if "fomaml" in line[-1] else 0, stderr="it diverged")

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(NIWError, match="it diverged"):
        compare(replace(SMALL, samples=None), tmp_path, ["fomaml", "maml"], [0, 1], data)
    monkeypatch.setattr("subprocess.run", None)
    with pytest.raises(DataError, match="looked for"):  # before any run
        compare(replace(SMALL, samples=None), tmp_path, ["maml"], [0], tmp_path)
    assert [Path(folder).name for folder in asked] == ["fomaml-0", "maml-0", "maml-0", "fomaml-1", "maml-1", "maml-1"]


def test_settings_and_seeds_are_looked_at_first(data, tmp_path, capsys):
    for change, message in (
        ({"settings": {"maml": {"iterations": 3}}}, "settings of maml may be lr"),
        ({"settings": {"svm": {}}}, "got 'svm'"),
        ({"settings": {"protonet": {"steps": 3}}}, "settings of protonet: it has no steps"),
        ({"seeds": [0, 0]}, "seeds must differ"),
        ({"methods": ["maml", "maml"]}, "methods must differ"),
        ({"methods": ["protonet", "ridge"]}, "inner_lr: none of protonet, ridge has it"),
        ({"methods": ["metaqda-fixed", "niw"]}, "metaqda-fixed: pretraining must be 1 or more"),
        ({"methods": ["svm"]}, "got 'svm'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            compare(replace(SMALL, samples=None), tmp_path, **{"methods": ["maml"], "root": data, **change})
    for text in ("{", "[1]", '{"maml": 3}'):
        (tmp_path / "settings.json").write_text(text)
        assert main(["compare", "--settings", str(tmp_path / "settings.json"), "--out", str(tmp_path)]) == 1
        assert "settings.json" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_runs_of_unequal_budgets_are_no_table(data, tmp_path):
    for name, iterations in (("protonet", 2), ("ridge", 3)):
        folder = tmp_path / "runs" / f"{name}-0"
        train(replace(SMALL, method=name, iterations=iterations, validations=1), folder, data)
        evaluate(folder, data)
    with pytest.raises(ArgumentError, match="protonet-0 and .*ridge-0 cannot be one table: iterations is 2 of"):
        report(tmp_path)


@pytest.mark.slow
def test_what_cannot_be_one_table_is_not_trained(data, tmp_path):
    config = replace(SMALL, steps=None, inner_lr=None, samples=None)
    compare(config, tmp_path, ["protonet"], [0], data)
    with pytest.raises(CheckpointError, match="protonet-0 holds a run with shots = 1, not 2"):
        compare(replace(config, shots=2), tmp_path, ["ridge"], [0], data)
    with pytest.raises(CheckpointError, match="protonet-0 holds a run with lr = 0.001, not 0.1"):
        compare(replace(config, lr=0.1), tmp_path, ["ridge", "protonet"], [0], data)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["protonet-0"]


def test_a_report_says_where_it_was_run_and_spares_other_pages(data, tmp_path):
    train(replace(SMALL, method="protonet"), tmp_path / "runs" / "protonet-0", data)
    evaluate(tmp_path / "runs" / "protonet-0", data)
    (tmp_path / "README.md").write_text("# My project\n")
    with pytest.raises(ArgumentError, match="README.md is there already, and is no report '# cifarfs, 3-way 1-shot'"):
        report(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project\n"
    (tmp_path / "README.md").unlink()
    assert f"cores, torch {torch.__version__}" in report(tmp_path)
    assert report(tmp_path) + "\n" == (tmp_path / "README.md").read_text()
    with pytest.raises(ArgumentError, match="protonet-0 holds no results: .* It is a single run"):
        report(tmp_path / "runs" / "protonet-0")
    with pytest.raises(ArgumentError, match="nowhere is no folder"):
        report(tmp_path / "nowhere")


def test_a_row_has_one_setting_and_a_seed_once(data, tmp_path):
    for name, change in (("0", {}), ("1", {"seed": 1, "lr": 0.1})):
        train(replace(SMALL, method="protonet", **change), tmp_path / "runs" / f"protonet-{name}", data)
        evaluate(tmp_path / "runs" / f"protonet-{name}", data)
    with pytest.raises(ArgumentError, match="protonet-0 and .*protonet-1 cannot be one table: lr is 0.001 of"):
        report(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "protonet-1")
    shutil.copytree(tmp_path / "runs" / "protonet-0", tmp_path / "runs" / "protonet-0-old")
    with pytest.raises(ArgumentError, match="protonet-0 and .*protonet-0-old are of the same seed"):
        report(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "protonet-0-old")
    tasks = tmp_path / "runs" / "protonet-0" / "tasks.npz"
    whole = tasks.read_bytes()
    for broken in (b"", b"none", whole[: len(whole) // 2]):
        tasks.write_bytes(broken)
        with pytest.raises(CheckpointError, match="tasks.npz cannot be read: .* Test the run anew"):
            report(tmp_path)
    tasks.write_bytes(whole)
    report(tmp_path)
    (tmp_path / "intervals.json").write_text("{")
    with pytest.raises(CheckpointError, match="intervals.json cannot be read: .* Delete it"):
        report(tmp_path)
    for name in ("intervals.json", "reliability.png"):
        (tmp_path / name).unlink()
    tasks.unlink()
    assert "reliability.png" not in report(tmp_path)  # there is none to be shown


def test_the_diagram_of_all_seeds_is_that_of_all_data_and_errors_are_over_seeds(tmp_path):
    torch.manual_seed(0)
    runs, everything = [], []
    for seed, n in enumerate((30, 50, 20)):
        probabilities, y = torch.randn(n, 4).softmax(-1), torch.randint(4, (n,))
        everything.append((probabilities, y))
        found = reliability(probabilities, y)
        tasks = {key: value.numpy() for key, value in found._asdict().items()}
        own = {**tasks, "accuracy_by_bin": tasks["accuracy"]}
        runs.append(Run(tmp_path, replace(SMALL, seed=seed), {"nll": float(seed**2)}, [], own))
    expected = reliability(*(torch.cat(parts) for parts in zip(*everything)))
    for one, other in zip(pooled(runs), expected):
        torch.testing.assert_close(one.double(), other.double(), equal_nan=True)
    error = (((0 - 5 / 3) ** 2 + (1 - 5 / 3) ** 2 + (4 - 5 / 3) ** 2) / 2 / 3) ** 0.5
    assert mean_and_error(runs, "nll") == f"1.667 ± {error:.3f}"


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
    assert main(["train", *arguments, "--steps", "4", "--out", str(tmp_path / "other")]) == 1
    assert "protonet has no steps" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["train", *arguments, "--out", str(tmp_path / "file")]) == 1
    assert "cannot be made a folder" in capsys.readouterr().err
    diverging = ["--method=fomaml", *LINE, "--inner-lr", "1e30"]
    assert main(["train", *diverging, "--out", str(tmp_path / "diverging")]) == DIVERGED


def test_sine_line_s_report_is_the_same_command_s(tmp_path):
    run = {"row": "ridge", "title": "RidgeNet", "baseline": None, "seed": 0, "budget": 10, "batch": 20, "test_tasks": 5}
    run |= {"mse": 0.5, "nll": 1.0, "r_ece": 0.1, "reliability": [0.5, 1.0], "curve": [1.0], "seconds": 1.0}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ridge-0.json").write_text(json.dumps({**run, "parameters": 3, "machine": "here"}))
    assert "| RidgeNet |" in report(tmp_path)


def test_sine_line_s_intervals_are_of_the_same_seeds_and_go_with_their_scores(tmp_path):
    shared = {"budget": 10, "batch": 20, "test_tasks": 3, "r_ece": 0.1, "reliability": [0.5, 1.0], "curve": [1.0]}
    shared |= {"seconds": 1.0, "parameters": 3, "machine": "here"}
    for folder in ("runs", "tasks"):
        (tmp_path / folder).mkdir()

    def write(row, seed, mse):
        run = {
            **shared,
            "row": row,
            "title": row,
            "baseline": None,
            "seed": seed,
            "mse": float(np.mean(mse)),
            "nll": 1.0,
        }
        (tmp_path / "runs" / f"{row}-{seed}.json").write_text(json.dumps(run))
        np.savez(tmp_path / "tasks" / f"{row}-{seed}.npz", mse=np.array(mse), nll=np.ones(3))

    for seed, noise in ((0, 0.0), (1, 5.0), (10, 9.0), (2, 2.0)):
        write("ridge", seed, [1.0 + noise, 2.0 + noise, 3.0 + noise])
        write("maml-1", seed, [2.0 + noise, 3.0 + noise, 4.0 + noise])
    assert "| +1.000 (+1.000 to +1.000) |" in report(tmp_path)  # the seeds' own noise is gone
    for path in (tmp_path / "tasks").iterdir():
        path.unlink()
    assert "| +1.000 (+1.000 to +1.000) |" in report(tmp_path)
    (tmp_path / "runs" / "maml-1-2.json").unlink()
    assert "| +1.000 (+1.000 to +1.000) |" not in report(tmp_path)
