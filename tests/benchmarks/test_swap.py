"""The swap's results, packed."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import swap

from l2l_niw.errors import CheckpointError


@pytest.fixture
def results(tmp_path):
    return Path(shutil.copytree(swap.RESULTS, tmp_path / "swap", ignore=shutil.ignore_patterns("*-[0-9]*")))


def test_the_committed_page_is_that_of_the_packed_file_and_runs_count_as_done(results, capsys):
    page = (results / "README.md").read_text()
    for seed in (0, 1, 2):
        for method in swap.METHODS:
            swap.run(method, seed, None, swap.CONFIG, results)  # without data nothing can be trained
    swap.report(results)
    assert (results / "README.md").read_text() == page
    with pytest.raises(SystemExit, match="MAML-0 was run with another budget"):
        swap.run("MAML", 0, None, {**swap.CONFIG, "iterations": 3}, results)


def test_a_run_s_own_file_wins(results):
    run = swap.load_runs(results)["NIW", 1]
    (results / "NIW-1.json").write_text(json.dumps({**run, "seconds": 3e6}))
    assert swap.load_runs(results)["NIW", 1]["seconds"] == 3e6
    assert len(swap.load_runs(results)) == 3 * len(swap.METHODS)


@pytest.mark.parametrize("text", ["{", '{"row": "ridge"}', '{"method": "SVM"}'])
def test_broken_results_are_named(results, text):
    (results / swap.FILE).write_text(text)
    with pytest.raises(CheckpointError, match="runs.jsonl .*Restore it from git"):
        swap.report(results)
