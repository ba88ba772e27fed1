"""The few-shot benchmarks: a search of the same size for every method, then the table."""

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from drawings import draw_cifarfs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import few_shot
import few_shot_images
import few_shot_intents
import pretrained_images

from l2l_niw.vision import METHODS, Config, evaluate, train
from l2l_niw.reports.image_runs import packed_configs
from l2l_niw.vision.compare import Failure

BENCHMARKS = [few_shot_images.BENCHMARK, few_shot_intents.BENCHMARK, pretrained_images.BENCHMARK]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A small column, and runs in this process."""
    small = {"ways": 3, "queries": 2, "train_queries": 2, "filters": 4, "meta_batch": 1, "test_tasks": 12}
    column = Config(iterations=5, validations=1, validation_tasks=2, steps=1, samples=2, **small)
    monkeypatch.setattr(few_shot_images, "BENCHMARK", replace(few_shot_images.BENCHMARK, columns={"small": column}))
    data, started = draw_cifarfs(tmp_path / "data"), []

    def run_all(runs, root, jobs=1, stages=("train", "test")):
        failures = {}
        for config, folder in runs:
            started.append(folder.name)
            if config.method == "ridge" and config.lr < 0.002:
                failures[folder] = Failure("a line failed:\nit diverged", True)
                continue
            if config.method == "metaqda":
                failures[folder] = Failure("it was killed", False)
                continue
            train(config, folder, root)
            if "test" in stages:
                evaluate(folder, root)
        return failures

    monkeypatch.setattr(few_shot, "run_all", run_all)
    monkeypatch.setattr("l2l_niw.vision.compare.run_all", run_all)

    def call(*arguments):
        line = ["few_shot_images.py", "--data", str(data), "--results", str(tmp_path / "results"), *arguments]
        monkeypatch.setattr(sys, "argv", line)
        few_shot_images.BENCHMARK.main("")

    return call, tmp_path / "results" / "small", started


@pytest.mark.parametrize(("benchmark", "column"), [(b, column) for b in BENCHMARKS for column in b.columns])
def test_committed_runs_count_as_done(benchmark, column, monkeypatch):
    started, folder = [], benchmark.results / column
    packed = {(c.method, c.seed) for c in packed_configs(folder, benchmark.columns[column])}
    monkeypatch.setattr("l2l_niw.vision.compare.run_all", lambda runs, *_: started.extend(runs))
    monkeypatch.setattr(few_shot, "pack", lambda folder: None)
    shared = {"methods": benchmark.methods, "seeds": [0, 1, 2], "data": "", "jobs": 1}
    benchmark.table(column, argparse.Namespace(results=benchmark.results, **shared))
    assert not packed & {(config.method, config.seed) for config, _ in started}


@pytest.mark.slow
def test_what_is_packed_is_not_run_again_and_a_new_method_joins_it(here, capsys):
    call, folder, started = here
    call("--methods", "protonet", "niw-ncc", "--seeds", "0")
    shutil.rmtree(folder / "runs")
    call("--methods", "protonet", "niw-ncc", "anil", "--seeds", "0")
    assert started == ["protonet-0", "niw-ncc-0", "anil-0"]
    shutil.rmtree(folder / "runs")
    (folder / "settings.json").write_text(json.dumps({"anil": {"lr": 0.1}}))
    call("--methods", "protonet", "niw-ncc", "anil", "--seeds", "0")
    assert started[3:] == ["anil-0"]  # with other settings it is another run
    assert "| lr 0.1, inner_lr 0.1, steps 1 |" in capsys.readouterr().out


def test_a_method_without_a_search_is_refused(here, capsys):
    call, results, _ = here
    with pytest.raises(SystemExit):
        call("--columns", "small", "--methods", "niw", "--tune")
    assert "--tune: niw has its baseline's settings" in capsys.readouterr().err
    assert not results.exists()


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_method_has_four_settings(benchmark):
    for method in benchmark.methods:
        assert set(few_shot.searches_of(method)) <= {*few_shot.SEARCHED, *few_shot.HEADS}
        if method in few_shot.SEARCHED:
            assert len({json.dumps(own) for own in benchmark.space(method)}) == 4
        assert METHODS[method].baseline in (None, *benchmark.methods)
    for column in benchmark.columns.values():
        assert column.iterations % few_shot.TRIAL == 0


@pytest.mark.slow
def test_the_best_on_validation_is_what_is_trained_and_reported(here, monkeypatch, capsys):
    call, folder, started = here
    call("--tune", "--methods", "protonet", "niw-ncc")
    assert len(started) == 5  # NIW has its baseline's learning rate, and one training to find a width
    found = json.loads((folder / "search.json").read_text())["protonet"]
    assert [line["lr"] for line in found] == list(few_shot_images.BENCHMARK.outer)
    best = min(found, key=lambda line: line["validation_nll"])
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["protonet"] == {"lr": best["lr"]}
    widths = json.loads((folder / "search.json").read_text())["niw-ncc"]
    assert [line["prior_std"] for line in widths] == [0.05 * factor for factor in few_shot.WIDTHS]
    assert len({line["validation_nll"] for line in widths}) == 4
    width = min(widths, key=lambda line: line["validation_nll"])["prior_std"]
    call("--methods", "protonet", "niw-ncc", "--seeds", "0")
    printed = capsys.readouterr().out
    assert f"| lr {best['lr']:g} |" in printed
    own = Config.load(folder / "runs" / "niw-ncc-0")
    assert (own.lr, own.prior_std) == (best["lr"], width)
    before = len(started)
    call("--report")
    assert len(started) == before
    assert "| ProtoNet | 1 |" in capsys.readouterr().out


def test_a_trial_that_fails_is_the_worst_one_and_if_all_do_there_is_nothing_to_choose(here, monkeypatch):
    call, folder, _ = here
    call("--tune", "--methods", "ridge")
    found = json.loads((folder / "search.json").read_text())["ridge"]
    assert [line.get("error") for line in found] == ["it diverged", "it diverged", "it diverged", None]
    assert json.loads((folder / "settings.json").read_text())["ridge"]["lr"] == 0.002
    lower = replace(few_shot_images.BENCHMARK, outer=(0.0001, 0.0002, 0.0003, 0.0004))
    monkeypatch.setattr(few_shot_images, "BENCHMARK", lower)
    with pytest.raises(RuntimeError, match="every setting of ridge failed, the last one with: it diverged"):
        call("--tune", "--methods", "ridge")


def test_a_trial_that_was_stopped_is_no_trial(here):
    call, folder, _ = here
    with pytest.raises(SystemExit, match="it was killed"):
        call("--tune", "--methods", "metaqda")
    assert not (folder / "settings.json").exists()
