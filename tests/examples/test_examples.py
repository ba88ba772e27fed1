"""The examples and benchmarks run, on the smallest sizes."""

import argparse
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import l2l_niw.heads
from l2l_niw.errors import CheckpointError, InUseError
from l2l_niw.utils._files import locked

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "heads"), str(ROOT / "benchmarks")]

import complexity
import complexity_profile
import demo
import heads
import known_population
import swap
import swap_maml
from processes import in_own_process
from regression.base import Plain
from regression.training import STATE, train

TINY = {**swap.CONFIG, "filters": 4, "steps": 2, "meta_batch": 2, "queries": 2, "test_tasks": 4, "samples": 2}


@pytest.mark.parametrize("method", ["maml", "niw"])
def test_the_swap_example_runs(method, capsys):
    swap_maml.main(method=method, iterations=2, tasks_per_batch=2)
    assert f"{method}: query loss" in capsys.readouterr().out


def test_a_known_population_prints_a_table_and_saves_a_plot(tmp_path, capsys):
    known_population.main(iterations=2, meta_batch=2, test_tasks=3, out=tmp_path)
    printed = capsys.readouterr().out
    assert "MAML" in printed
    assert "NIW" in printed
    assert Image.open(tmp_path / "predictions.png").width > 500


@pytest.mark.slow
def test_the_demo_prints_a_table_and_writes_a_page_of_its_own(tmp_path, capsys):
    found = demo.main(budget=3, test_tasks=40, out=tmp_path)
    printed = capsys.readouterr().out
    page = (tmp_path / "index.html").read_text()
    for row, title in demo.SHOWN_ROWS.items():
        assert f"\n{title}" in printed
        assert f"{found[row]['nll']:.3f}" in page
        assert f"{title}, task 4" in page
    assert page.count("<svg") == 5
    elsewhere = {link.rstrip('">') for link in re.findall(r"(?:src|href)=\S+|url\(\S+", page)}
    assert all("#" in link for link in elsewhere), "the page fetches something"
    assert all(distance >= 0 for distance in found[demo.NIW_ROW]["movement"].values())
    shares = found[demo.MIXTURE_ROW]["shares"]
    assert list(shares) == ["straight lines", "sines", "task 1", "task 2", "task 3", "task 4"]
    assert all(sum(own) == pytest.approx(1.0) for own in shares.values())


HEAD_EXAMPLES = sorted(p.stem for p in (ROOT / "examples" / "heads").glob("*.py") if p.stem not in ("compare", "tasks"))


@pytest.mark.parametrize("name", HEAD_EXAMPLES)
def test_the_heads_examples_print_a_comparison(name, capsys):
    main = importlib.import_module(name).main
    results = main(iterations=2, tasks_per_batch=2, test_tasks=3, samples=2)
    printed = capsys.readouterr().out
    for method, scores in results.items():
        assert f"\n{method}" in printed
        assert f"{scores['nll']:9.3f}" in printed
    again = main(iterations=2, tasks_per_batch=2, test_tasks=3, samples=2)
    assert all(again[method]["nll"] == scores["nll"] for method, scores in results.items())


def test_there_is_an_example_for_every_head():
    scripts = {name.replace("_", "") for name in HEAD_EXAMPLES}
    assert scripts == {name.lower() for name in l2l_niw.heads.__all__ if name != "Head"}


@pytest.mark.parametrize("name", ["CNP", "MetaQDA, MAP"])
def test_the_heads_benchmark_measures_an_episode_with_the_head_and_without(name):
    measured = heads.measure(name, argparse.Namespace(shots=1, queries=1, steps=1, episodes=1))
    assert min(measured[side] for side in ("conv", "with", "without")) > 0
    assert measured["parameters"] == sum(p.numel() for p in heads.HEADS[name]().parameters())


@pytest.mark.parametrize(
    "method", [m for m in complexity.methods_of("sine-line", complexity.METHODS) if not m.endswith("-50")]
)
def test_the_complexity_benchmark_measures_every_method(method):
    measured = complexity.measure(f"time/sine-line/{method}", seconds=0.0)
    assert measured["seconds"] > 0
    assert measured["runs"] == 3


@pytest.mark.parametrize("cell", ["memory/sine-line/niw-5", "predict/sine-line", "calls/sine-line"])
def test_the_complexity_benchmark_measures_every_kind_of_cell(cell):
    least = -1 if cell.startswith("memory") else 0  # MB: kernels count a process's pages to some tenths
    assert all(value >= least for value in complexity.measure(cell, seconds=0.0).values())


def test_the_complexity_benchmark_goes_on_where_it_was_and_reports(tmp_path, monkeypatch, capsys):
    asked = []

    def fake(script, threads, variables, measure, seconds):
        asked.append(measure)
        kind, _, method = (measure + "//").split("/")[:3]
        if kind == "calls":
            return {"calls": 39}
        if kind == "predict":
            return {"loop": 0.003, "vectorized": 0.001}
        slow = {"protonet": 1, "maml-1": 2, "niw-5": 3}.get(method, 4)
        return {"seconds": 0.002 * slow, "own": 10.0 * slow, "peak": 100.0, "runs": 3}

    monkeypatch.setattr(complexity, "in_own_process", fake)
    options = {"networks": ["sine-line"], "methods": ["protonet", "maml-1", "niw-5", "fo-maml-5"], "seconds": 1.0}
    for rounds in (1, 2):
        args = argparse.Namespace(rounds=rounds, results=tmp_path, threads=1, kinds=list(complexity.KINDS), **options)
        complexity.run(args)
    assert asked.count("time/sine-line/protonet") == 2
    assert asked.count("memory/sine-line/protonet") == 1
    complexity.report(tmp_path)
    text = capsys.readouterr().out
    assert "| maml-1 | 4.00 (4.00 to 4.00) | 2.00 | 1.00 | 20.0 | 2.00 | 1.00 |" in text
    assert "| NIW / first-order MAML, 5 steps: time | <= 1.60 | sine-line 0.750 | met |" in text
    assert "| Python functions called by `adapt` | <= 40.00 | sine-line 39.00 | met |" in text
    assert "| 10 sampled networks, a loop / at once: time | >= 2.00 | omniglot 3.00, sine-line 3.00 | met |" in text
    assert (tmp_path / "steps.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_complexity_benchmark_profiles_an_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(complexity_profile, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["complexity_profile.py", "sine-line/niw-3", "--repeats", "20"])
    complexity_profile.main()
    text = (tmp_path / "profiles" / "sine-line_niw-3.txt").read_text()
    assert "aten::addmm" in text
    assert any(name in text for name in ("learner.py", "chain.py", "last_layer.py", "objective.py"))


@pytest.fixture
def omniglot(tmp_path):
    """Seven characters of six drawings each, in torchvision's folders."""
    for part in ("background", "evaluation"):
        for character in range(7):
            folder = tmp_path / "omniglot-py" / f"images_{part}" / "alphabet" / f"character{character}"
            folder.mkdir(parents=True)
            for drawing in range(6):
                pixels = (torch.rand(105, 105) * 255).byte().numpy()
                Image.fromarray(pixels).save(folder / f"{drawing}.png")
    return tmp_path


@pytest.mark.parametrize("method", list(swap.METHODS))
def test_the_swap_benchmark_scores_every_method(method, omniglot, tmp_path, capsys):
    swap.run(method, 0, omniglot, {**TINY, "iterations": 2}, tmp_path / "results")
    result = json.loads((tmp_path / "results" / f"{method}-0.json").read_text())
    assert 0 <= result["test"]["accuracy"] <= 1
    assert 0 <= result["test"]["ece"] <= 1
    swap.report(tmp_path / "results")
    assert f"| {method} | 1 |" in capsys.readouterr().out


def test_a_stopped_swap_resumes_to_the_same_result(omniglot, tmp_path):
    tasks = swap.taskset(swap.load_characters(omniglot, "background"), 5, 1, 2)

    def train(iterations, checkpoint):
        return swap.train("NIW", 0, tasks, {**TINY, "iterations": iterations}, checkpoint, every=2)[0].state_dict()

    whole = train(4, tmp_path / "whole.pt")
    train(2, tmp_path / "parts.pt")
    parts = train(4, tmp_path / "parts.pt")
    for key, value in whole.items():
        assert torch.equal(value, parts[key]), key
    with pytest.raises(SystemExit, match="another budget"):  # it has had more already
        train(2, tmp_path / "whole.pt")


def test_a_swap_s_checkpoint_holds_no_objects_and_an_older_one_is_named(omniglot, tmp_path, monkeypatch):
    tasks = swap.taskset(swap.load_characters(omniglot, "background"), 5, 1, 2)
    path, config = tmp_path / "NIW-0.pt", {**TINY, "iterations": 2}
    swap.train("NIW", 0, tasks, config, path, every=2)
    state = torch.load(path, weights_only=True)
    assert tuple(state) == swap.STATE
    states = {"numpy": np.random.get_state()}  # which has an array, and needs weights_only=False
    for broken, message in (({**state, **states}, "cannot be read"), ([1], "holds a list"), ({}, "lacks wrapper, opt")):
        torch.save(broken, path)
        with pytest.raises(CheckpointError, match=rf"NIW-0.pt {message}.* Delete it to train anew"):
            swap.train("NIW", 0, tasks, config, path, every=2)
    line = ["swap.py", "--data", str(omniglot), "--methods", "NIW", "--seeds", "0", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit, match="swap.py: .*NIW-0.pt lacks wrapper"):
        swap.main()
    with locked(tmp_path / "NIW-0.lock"), pytest.raises(SystemExit, match="swap.py: .* is in use by process"):
        swap.main()
    monkeypatch.setattr(sys, "argv", [*line, "--seeds", str(2**32)])
    with pytest.raises(SystemExit, match="2"):
        swap.main()


def test_a_regression_checkpoint_that_is_something_else_is_named_and_one_process_s(tmp_path):
    path = tmp_path / "unfinished" / "ridge-0.pt"
    path.parent.mkdir()
    for content, message in (([1], "holds a list"), ({}, f"lacks {', '.join(STATE)}")):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=rf"ridge-0.pt {message}.* Delete it to train anew"):
            train(Plain("ridge"), 0.01, 2, seed=0, checkpoint=path)
    with locked(path.with_suffix(".lock")), pytest.raises(InUseError, match="unfinished is in use by process"):
        train(Plain("ridge"), 0.01, 2, seed=0, checkpoint=path)


def test_no_file_is_read_with_objects_that_may_run_code():
    root = Path(swap.__file__).parents[1]
    sources = [path for part in ("l2l_niw", "benchmarks", "examples") for path in (root / part).rglob("*.py")]
    assert sources
    for path in sources:
        for call in re.findall(r"torch\.load\([^\n]*", path.read_text()):
            assert "weights_only=True" in call, path


def test_swaps_of_other_budgets_are_no_table(tmp_path):
    for seed in (0, 1):
        run = {"method": "NIW", "seed": seed, "config": {"iterations": seed + 1}, "seconds": 1.0, "machine": "here"}
        run["test"] = dict.fromkeys(("accuracy", "ece", "nll", "brier"), 0.5)
        (tmp_path / f"NIW-{seed}.json").write_text(json.dumps(run))
    with pytest.raises(SystemExit, match="NIW-0 and NIW-1 are of other budgets"):
        swap.report(tmp_path)


def test_missing_data_says_how_to_get_it(tmp_path):
    with pytest.raises(SystemExit, match="download=True"):
        swap.load_characters(tmp_path, "background")


@pytest.mark.slow
def test_a_cell_is_measured_in_a_process_of_its_own():
    measured = in_own_process(complexity.__file__, 1, measure="time/sine-line/niw-ggn-5", seconds=0.0)
    assert measured["seconds"] > 0
    with pytest.raises(RuntimeError, match="nothing"):
        in_own_process(complexity.__file__, 1, measure="time/nothing/niw-5")
