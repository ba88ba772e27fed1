"""What reports make of packed results is what they make of the runs."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from result_folders import write_image_run, write_sine_line_run

from l2l_niw.errors import ArgumentError, CheckpointError
from l2l_niw.reports import images, pack, report, sine_line
from l2l_niw.reports.image_runs import load_packed, packed_configs

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def made(folder):
    """Everything that a report writes, as bytes."""
    report(folder)
    return {name: (folder / name).read_bytes() for name in ("README.md", "curves.png", "intervals.json")}


@pytest.fixture
def comparison(tmp_path):
    for method in ("protonet", "niw-ncc", "maml"):
        for seed in (0, 1, 10):
            write_image_run(tmp_path, method, seed)
    return tmp_path


@pytest.fixture
def rows(tmp_path):
    for seed in (0, 1, 10):
        write_sine_line_run(tmp_path, "ridge", seed)
        write_sine_line_run(tmp_path, "niw-ridge", seed, baseline="ridge")
    return tmp_path


def test_a_comparison_s_report_is_the_same_from_its_packed_file(comparison):
    before, diagram = made(comparison), (comparison / "reliability.png").read_bytes()
    pack(comparison)
    shutil.rmtree(comparison / "runs")
    for name in (*before, "reliability.png"):
        (comparison / name).unlink()
    assert made(comparison) == before
    assert (comparison / "reliability.png").read_bytes() == diagram


def test_sine_line_s_report_is_the_same_from_its_packed_file(rows):
    before = made(rows)
    pack(rows)
    shutil.rmtree(rows / "runs")
    assert made(rows) == before
    shutil.rmtree(rows / "tasks")
    assert made(rows) == before


@pytest.mark.parametrize(("kind", "name"), [("comparison", "results.npz"), ("rows", "results.jsonl")])
def test_the_same_figures_are_the_same_bytes(kind, name, request):
    folder = request.getfixturevalue(kind)
    pack(folder)
    first = (folder / name).read_bytes()
    for path in folder.rglob("*"):
        os.utime(path, (2e9, 2e9))
    (folder / name).unlink()
    pack(folder)
    assert (folder / name).read_bytes() == first
    shutil.rmtree(folder / "runs")
    pack(folder)
    assert (folder / name).read_bytes() == first


def test_a_packed_comparison_is_plain_arrays_and_json(comparison):
    pack(comparison)
    with np.load(comparison / "results.npz", allow_pickle=False) as file:
        arrays = dict(file)
    assert arrays["nll"].shape == (9, 12)
    assert [run["config"]["method"] for run in json.loads(str(arrays["runs"]))][:4] == ["maml"] * 3 + ["protonet"]


def test_a_run_s_folder_wins_and_new_ones_join_what_is_packed(comparison):
    pack(comparison)
    shutil.rmtree(comparison / "runs")
    folder = write_image_run(comparison, "protonet", 1)
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps({**metrics, "memory": 3e6}))
    write_image_run(comparison, "ridge", 0)
    unfinished = write_image_run(comparison, "maml", 0)
    (unfinished / "metrics.json").unlink()
    text = report(comparison)
    assert " | 1000000 | " in text
    assert "| ridge (R2D2) | 1 |" in text
    assert "| MAML | 3 |" in text
    pack(comparison)
    shutil.rmtree(comparison / "runs")
    assert report(comparison) == text
    assert len(load_packed(comparison)) == 10


def test_a_row_s_own_file_wins_over_what_is_packed(rows):
    pack(rows)
    shutil.rmtree(rows / "runs")
    write_sine_line_run(rows, "ridge", 1, seconds=3e6)
    write_sine_line_run(rows, "maml-1", 0, title="MAML")
    text = report(rows)
    assert " | 1000001 | " in text
    assert "| MAML | " in text


def test_packed_runs_are_known_by_their_configs(comparison):
    pack(comparison)
    config = load_packed(comparison)[0].config
    assert config in packed_configs(comparison, config)
    other = type(config)(**{**vars(config), "iterations": 5})
    with pytest.raises(ArgumentError, match="results.npz is of runs with iterations = 4, not 5. Choose another folder"):
        packed_configs(comparison, other)


def test_a_run_without_its_tasks_is_not_packed(comparison):
    (comparison / "runs" / "maml-1" / "tasks.npz").unlink()
    with pytest.raises(CheckpointError, match="maml-1 cannot be packed without its tasks.npz. Test the run anew"):
        pack(comparison)
    assert not (comparison / "results.npz").exists()


def test_a_page_says_what_was_found_first_and_links_what_was_tried(comparison):
    (comparison / "notes.md").write_text("NIW wins.\n\n## How\n- by luck\n")
    (comparison / "trials.md").write_text("# Trials\n")
    text = report(comparison)
    places = [text.index(part) for part in ("# cifarfs", "NIW wins.", "| method |", "## How", "- by luck", "trials.md")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "name",
    [*sorted(str(path.parent.relative_to(RESULTS)) for path in RESULTS.glob("*images/*/results.npz")), "sine_line"],
)
def test_committed_pages_are_those_of_the_packed_files(name, tmp_path, monkeypatch):
    folder = tmp_path / "results"
    shutil.copytree(RESULTS / name, folder, ignore=shutil.ignore_patterns("runs", "tasks", "search"))
    page = (folder / "README.md").read_text()
    for module, plot in ((images, "plot_curves"), (images, "plot_reliability"), (sine_line, "plot")):
        monkeypatch.setattr(module, plot, lambda *_: None)
    assert report(folder) + "\n" == page
