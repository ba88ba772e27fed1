"""Broken results: one line that names the file and the remedy, and no traceback."""

import contextlib
import json
import shutil

import numpy as np
import pytest
from result_folders import write_image_run, write_sine_line_run

from l2l_niw.__main__ import main
from l2l_niw.errors import NIWError
from l2l_niw.reports import images, pack, report, sine_line
from l2l_niw.reports._packed import read_arrays, write_arrays
from l2l_niw.vision.runs import COLUMNS

NPZ, JSONL, HEADER = "results.npz", "results.jsonl", ",".join(COLUMNS)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    for module, plot in ((images, "plot_curves"), (images, "plot_reliability"), (sine_line, "plot")):
        monkeypatch.setattr(module, plot, lambda *_: None)


def refused(folder, capsys):
    """The one line that the command line says of it."""
    assert main(["report", str(folder)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def without(path, key):
    """A JSON file's text without one of its keys."""
    found = json.loads(path.read_text())
    del found[key]
    return json.dumps(found)


@pytest.fixture
def comparison(tmp_path):
    for seed in (0, 1):
        write_image_run(tmp_path, "protonet", seed)
    return tmp_path


@pytest.fixture
def packed(comparison):
    pack(comparison)
    shutil.rmtree(comparison / "runs")
    return comparison


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.json", "{}", "metrics.json lacks accuracy, ece, ece_all, nll, brier, seconds, memory. Test the run"),
        ("metrics.json", "[1]", "metrics.json lacks accuracy"),
        ("metrics.json", "{", "metrics.json cannot be read"),
        ("metrics.json", ("accuracy", "high"), "metrics.json: accuracy must be a number, and is 'high'. Test the run"),
        ("metrics.json", ("ece_ts", "low"), "metrics.json: ece_ts must be a number"),
        ("log.csv", None, "protonet-1 has scores, but no log.csv. Train and test the run anew"),
        ("log.csv", "", "log.csv cannot be read as a run's log"),
        ("log.csv", "iteration,validation_nll\n", "log.csv cannot be read as a run's log: its columns are not"),
        ("log.csv", "1,2\n3,4\n", "Train the run with the same command again"),
        ("log.csv", f"{HEADER}\n2,1,1,1,1,1\n", "log.csv ends at iteration 2 of 4"),
        ("log.csv", f"{HEADER}\n4,1,1,1,1,1\n", "have other validation rounds"),
        ("log.csv", f"{HEADER}\n4,1\n", "log.csv cannot be read"),
        ("config.json", None, "no config.json"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", ("method", "svm"), "config.json: there is no method 'svm'. Move the run away"),
        ("tasks.npz", "", "tasks.npz cannot be read"),
        ("tasks.npz", "PK", "tasks.npz cannot be read"),
    ],
)
def test_a_run_s_broken_file_is_named(comparison, capsys, name, text, message):
    path = comparison / "runs" / "protonet-1" / name
    if isinstance(text, tuple):
        text = json.dumps({**json.loads(path.read_text()), text[0]: text[1]})
    path.unlink() if text is None else path.write_text(text)
    assert message in refused(comparison, capsys)


def test_tasks_of_other_shapes_are_named(comparison, capsys):
    path = comparison / "runs" / "protonet-1" / "tasks.npz"
    arrays = dict(np.load(path))
    for name, values in (("nll", np.ones(3)), ("counts", np.ones(21)), ("accuracy", np.array(["a"] * 12))):
        np.savez(path, **{**arrays, name: values})
        assert f"tasks.npz: {name} must be" in refused(comparison, capsys)
    np.savez(path, **{**arrays, "nll": np.array([{}] * 12)})
    assert "tasks.npz cannot be read: Object arrays cannot be loaded" in refused(comparison, capsys)
    np.savez(path, nll=np.ones(12))
    assert "tasks.npz cannot be read" in refused(comparison, capsys)


def test_a_report_needs_no_checkpoint_and_passes_over_what_is_not_tested(comparison):
    text = report(comparison)
    (comparison / "runs" / "maml-0").mkdir()
    for name in ("metrics.json", "log.csv", "tasks.npz"):
        shutil.copy(comparison / "runs" / "protonet-0" / name, comparison / "runs" / "maml-0" / name)
    (comparison / "runs" / "maml-0" / "metrics.json").unlink()
    assert report(comparison) == text


def test_a_page_that_cannot_be_written_is_named(comparison, capsys):
    (comparison / "README.md").mkdir()
    assert "README.md" in refused(comparison, capsys)


@pytest.mark.parametrize("text", ["[]", "[1]", '{"protonet": 3}', '{"protonet": {"of": "1", "accuracy": [1]}}'])
def test_intervals_of_another_form_are_named(comparison, capsys, text):
    (comparison / "intervals.json").write_text(text)
    assert "intervals.json holds no intervals. Delete it" in refused(comparison, capsys)


def test_a_packed_comparison_that_is_cut_off_is_named(packed, capsys):
    whole = (packed / NPZ).read_bytes()
    for length in (0, 2, 40, len(whole) // 2, len(whole) - 1):
        (packed / NPZ).write_bytes(whole[:length])
        assert "results.npz cannot be read" in refused(packed, capsys)


def test_a_packed_comparison_that_is_damaged_never_ends_in_a_traceback(packed):
    whole, random = (packed / NPZ).read_bytes(), np.random.default_rng(0)
    for place in random.integers(0, len(whole), 60):
        damaged = bytearray(whole)
        damaged[place] ^= int(random.integers(1, 256))
        (packed / NPZ).write_bytes(bytes(damaged))
        with contextlib.suppress(NIWError):
            report(packed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": np.array("[1")}, "holds no packed runs"),
        ({"runs": np.array("[1]")}, "holds no packed runs"),
        ({"runs": np.array("3")}, "holds no packed runs"),
        ({"runs": np.array("[]")}, "does not have the same runs in all of its arrays"),
        ({"nll": np.ones((3, 12))}, "does not have the same runs in all of its arrays"),
        ({"nll": np.ones((2, 5))}, "results.npz/protonet-0: nll must be 12 numbers"),
        ({"metrics": {}}, "results.npz/protonet-0 lacks accuracy"),
        ({"log": []}, "results.npz/protonet-0 has no validation rounds"),
        ({"log": [{"iteration": "4"}]}, "results.npz/protonet-0 lacks validation_accuracy"),
        ({"config": {"ways": 0}}, "holds no packed runs: ways must be"),
        ({"config": {"method": "svm"}}, "there is no method 'svm'"),
    ],
)
def test_a_packed_comparison_of_another_format_is_named(packed, capsys, change, message):
    arrays = dict(np.load(packed / NPZ))
    (name, value), *_ = change.items()
    if name not in arrays:
        records = json.loads(str(arrays["runs"]))
        records[0][name] = value
        change = {"runs": np.array(json.dumps(records))}
    write_arrays(packed / NPZ, {**arrays, **change})
    line = refused(packed, capsys)
    assert message in line
    assert "results.npz" in line


def test_other_files_in_the_place_of_a_packed_comparison_are_named(packed, capsys):
    np.savez(packed / NPZ, weights=np.ones(3))
    assert "results.npz cannot be read" in refused(packed, capsys)
    with (packed / NPZ).open("wb") as file:
        np.save(file, np.ones(3))
    assert "results.npz cannot be read" in refused(packed, capsys)
    (packed / NPZ).unlink()
    (packed / NPZ).mkdir()
    assert "results.npz cannot be read" in refused(packed, capsys)


def test_what_is_written_is_read_again(tmp_path):
    arrays = {"a": np.arange(3), "b": np.array("text"), "c": np.array([[np.nan, 1.5]])}
    write_arrays(tmp_path / "x.npz", arrays)
    found = read_arrays(tmp_path / "x.npz", list(arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("key", ["row", "title", "baseline", "seed", "mse", "r_ece", "reliability", "curve", "machine"])
def test_a_row_without_a_figure_is_named(tmp_path, capsys, key):
    path = write_sine_line_run(tmp_path)
    path.write_text(without(path, key))
    assert f"ridge-0.json lacks {key}. Run the row anew." in refused(tmp_path, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mse": "low"}, "ridge-1.json: mse must be a number"),
        ({"curve": [None]}, "ridge-1.json: curve must be a list of numbers"),
        ({"curve": [1.0]}, "ridge-0 and ridge-1 cannot be one table: the length of curve is 2"),
        ({"budget": 11}, "ridge-0 and ridge-1 cannot be one table: budget is 10 of the first, but 11"),
        ({"test_tasks": 7}, "ridge-0 and ridge-1 cannot be one table: test_tasks is 6"),
    ],
)
def test_rows_that_are_no_table_are_named(tmp_path, capsys, change, message):
    write_sine_line_run(tmp_path)
    write_sine_line_run(tmp_path, seed=1, **change)
    assert message in refused(tmp_path, capsys)


def test_a_row_s_tasks_that_are_broken_are_named(tmp_path, capsys):
    write_sine_line_run(tmp_path)
    path = tmp_path / "tasks" / "ridge-0.npz"
    np.savez(path, mse=np.ones(3), nll=np.ones(3))
    assert "ridge-0.npz: mse must be of 6 tasks. Run the row anew." in refused(tmp_path, capsys)
    path.write_bytes(b"PK")
    assert "ridge-0.npz cannot be read" in refused(tmp_path, capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no runs"),
        ('{"row": "rid', "cannot be read"),
        ("[1]\n", "cannot be read: line 1 is no run"),
        ('{"method": "MAML", "seed": 0}\n', "lacks row"),
    ],
)
def test_packed_rows_that_are_cut_off_or_others_are_named(tmp_path, capsys, text, message):
    (tmp_path / JSONL).write_text(text)
    line = refused(tmp_path, capsys)
    assert f"results.jsonl {message}" in line
    assert "Restore it from git" in line
    (tmp_path / JSONL).write_bytes(b"\xff\xfe\x00")
    assert "results.jsonl cannot be read" in refused(tmp_path, capsys)
