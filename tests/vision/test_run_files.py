"""The files of a run: written again from the checkpoint, written by one process, and named where they are broken."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from drawings import SMALL, draw_cifarfs

from l2l_niw.__main__ import main
from l2l_niw.data import get_tasksets
from l2l_niw.errors import ArgumentError, CheckpointError, InUseError, WriteError
from l2l_niw.reports import report
from l2l_niw.utils import _files
from l2l_niw.vision import Config, evaluate, runs, train
from l2l_niw.vision.compare import STAGES, commands_left, compare
from l2l_niw.vision.methods import complete

CONFIG = complete(replace(SMALL, method="protonet", iterations=2, validations=1))
PLAIN = replace(CONFIG, lr=None)
FULL, READ_ONLY = Path("/dev/full"), Path("/sys/kernel")  # as root may write to any other folder
linux = pytest.mark.skipif(not (FULL.exists() and READ_ONLY.exists()), reason="needs Linux's /dev/full and /sys")
BROKEN = {"cut off": lambda text: text[:-30], "no columns": lambda text: "1,2,3\n", "empty": lambda text: ""}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_cifarfs(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(data, tmp_path):
    """A trained run."""
    folder = tmp_path / "runs" / "protonet-0"
    train(CONFIG, folder, data)
    return folder


@pytest.fixture
def no_steps(monkeypatch):
    monkeypatch.setattr(runs.Training, "step", lambda *a: pytest.fail("it was trained again"))


@pytest.mark.parametrize("broken", [None, *BROKEN])
@pytest.mark.parametrize("again", ["train", "test"])
def test_a_finished_run_s_log_is_written_again(again, broken, data, run, no_steps):
    path = run / "log.csv"
    text = path.read_text()
    if broken is None:
        path.unlink()
    else:
        path.write_text(BROKEN[broken](text))
    if again == "train":
        assert train(CONFIG, run, data)[-1]["iteration"] == 2
    else:
        evaluate(run, data)
    assert path.read_text() == text


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_log_says_what_to_do(broken, run):
    path = run / "log.csv"
    path.write_text(BROKEN[broken](path.read_text()))
    with pytest.raises(CheckpointError, match=r"log.csv cannot be read as a run's log: .*same command again"):
        runs.read_log(run)


@pytest.mark.slow
def test_a_comparison_writes_a_finished_run_s_log_again_and_can_be_reported(data, run, no_steps):
    evaluate(run, data)
    scores = (run / "metrics.json").stat().st_mtime_ns
    (run / "log.csv").write_text("{")
    assert commands_left(CONFIG, run) == ["train"]
    compare(PLAIN, run.parents[1], ["protonet"], [0], data)
    assert commands_left(CONFIG, run) == []
    assert (run / "metrics.json").stat().st_mtime_ns == scores
    assert "| ProtoNet | 1 |" in report(run.parents[1])


def test_what_is_left_of_a_run(data, tmp_path):
    assert commands_left(CONFIG, tmp_path) == ["train", "test"]
    assert commands_left(CONFIG, tmp_path, ["train"]) == ["train"]
    train(CONFIG, tmp_path, data)
    assert commands_left(CONFIG, tmp_path, ["train"]) == []
    assert commands_left(CONFIG, tmp_path) == ["train", "test"]  # the first of which returns at once
    assert commands_left(CONFIG, tmp_path, STAGES) == ["train", "test", "shift"]
    evaluate(tmp_path, data)
    assert commands_left(CONFIG, tmp_path, STAGES) == ["shift"]
    (tmp_path / "checkpoint.pt").unlink()
    assert commands_left(CONFIG, tmp_path) == []
    (tmp_path / "log.csv").unlink()  # of which nothing is left to write it from
    assert commands_left(CONFIG, tmp_path) == ["train", "test"]


@pytest.mark.slow
@pytest.mark.skipif(_files.fcntl is None, reason="this system has no flock")
def test_a_folder_is_one_process_s_at_a_time(data, run, capsys):
    before = (run / "checkpoint.pt").read_bytes()
    hold = "import sys; from pathlib import Path; from l2l_niw.utils._files import locked\n"
    hold += "with locked(Path(sys.argv[1])):\n    print('locked', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", hold, str(run / ".lock")], **pipes) as other:
        try:
            assert other.stdout.readline() == "locked\n"
            with pytest.raises(InUseError, match=f"protonet-0 is in use by process {other.pid} on .*choose another"):
                train(CONFIG, run, data)
            assert main(["test", str(run), "--data", str(data)]) == 1
            assert "is in use by process" in capsys.readouterr().err
        finally:
            other.kill()
    assert (run / "checkpoint.pt").read_bytes() == before
    train(CONFIG, run, data)  # the lock ends with its process


def test_a_run_that_fails_frees_its_folder(data, tmp_path, monkeypatch):
    step = runs.Training.step
    monkeypatch.setattr(runs.Training, "step", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(CONFIG, tmp_path, data)
    monkeypatch.setattr(runs.Training, "step", step)
    train(CONFIG, tmp_path, data)


def broken_checkpoints(state):
    """(content, what the error says)."""
    yield [1, 2], "holds a list"
    yield {}, "lacks module, opt, schedule, random, done"
    yield {key: value for key, value in state.items() if key != "opt"}, "lacks opt"
    yield {**state, "module": [1]}, "another network"
    yield {**state, "module": {}}, "another network"
    yield {**state, "opt": {}}, "no state of Adam"
    yield {**state, "schedule": 3}, "no state of Adam"
    yield {**state, "random": torch.zeros(3)}, "no state of Adam"
    yield {**state, "done": "2", "log": None}, "done, log cannot be those of a run"


def test_a_checkpoint_that_is_something_else_is_named(data, run, capsys):
    path = run / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    arguments = ["test", str(run), "--data", str(data)]
    for content, message in broken_checkpoints(state):
        torch.save(content, path)
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error
        assert "Delete it to train anew" in error
        with pytest.raises(CheckpointError, match=message):
            train(CONFIG, run, data)
    for content in (b"", b"none", b"PK\x03\x04"):
        path.write_bytes(content)
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "checkpoint.pt cannot be read" in error


def test_a_checkpoint_runs_no_code(data, run, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({**torch.load(run / "checkpoint.pt", weights_only=True), "log": Evil()}, run / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="tensors only"):
        evaluate(run, data)
    assert not (tmp_path / "evil").exists()


@linux
def test_a_full_disk_leaves_the_old_checkpoint(data, run):
    before = (run / "checkpoint.pt").read_bytes()
    training = runs.trained(run)
    (run / "checkpoint.pt.new").symlink_to(FULL)
    with pytest.raises(WriteError, match="checkpoint.pt cannot be written: No space left on device"):
        training.save(run)
    assert (run / "checkpoint.pt").read_bytes() == before


@linux
@pytest.mark.parametrize("name", ["tasks.npz", "metrics.json"])
def test_a_full_disk_is_no_traceback(name, data, run, capsys):
    (run / f"{name}.new").symlink_to(FULL)
    assert main(["test", str(run), "--data", str(data)]) == 1
    assert f"{name} cannot be written: No space left on device" in capsys.readouterr().err
    assert not (run / "metrics.json").exists()


@linux
@pytest.mark.parametrize("folder", [READ_ONLY, READ_ONLY / "run"])
def test_a_read_only_folder_is_no_traceback(folder, data, capsys):
    options = [f"--{key.replace('_', '-')}={value}" for key, value in asdict(PLAIN).items() if value is not None]
    assert main(["train", *options, "--data", str(data), "--out", str(folder)]) == 1
    error = capsys.readouterr().err
    assert str(folder) in error
    assert "hoose another" in error


def test_other_errors_of_files_are_no_traceback(data, run, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device", "reliability.png")

    monkeypatch.setattr("l2l_niw.metrics.calibration.plot_reliability", full)
    assert main(["test", str(run), "--data", str(data)]) == 1
    assert "No space left on device: 'reliability.png'" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 2**64 + 1, 10**400, 1.5])
def test_seeds_that_torch_or_numpy_would_not_take_are_named(seed, data):
    message = f"seed must be a whole number of at least 0 and at most {2**63 - 1}"
    with pytest.raises(ArgumentError, match=message):
        replace(SMALL, seed=seed)
    with pytest.raises(ArgumentError, match=message):
        get_tasksets("cifarfs", 3, 1, 2, root=data, seed=seed)


def test_the_largest_seed_trains(data, tmp_path):
    train(replace(CONFIG, seed=2**63 - 1), tmp_path, data)
    assert Config.load(tmp_path).seed == 2**63 - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 3}, "'colour' is unknown"),
        ({"shots": "missing", "ways": "missing"}, "'ways' is missing; 'shots' is missing"),
        ({"method": ["niw"]}, "'method' is no text"),
        ({"ways": "five"}, "ways must be a whole number"),
        ({"seed": 2**64}, "seed must be a whole number"),
    ],
)
def test_a_config_with_other_keys_is_named(change, message, data, run, capsys):
    found = {**json.loads((run / "config.json").read_text()), **change}
    (run / "config.json").write_text(json.dumps({key: value for key, value in found.items() if value != "missing"}))
    assert main(["test", str(run), "--data", str(data)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"config.json cannot be read as a run's config: {message}" in error
    assert "Restore the file, or train anew in another folder" in error


@pytest.mark.parametrize("text", ["[]", "3", '"niw"'])
def test_a_config_that_is_no_dict_is_named(text, run):
    (run / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json holds a .* and not a run's settings"):
        Config.load(run)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_an_empty_folder_s_name_is_refused(command, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command, "--data", str(data), "--out", ""]) == 1
    assert "--out must name a folder, got ''" in capsys.readouterr().err
    for call in (train, compare):
        with pytest.raises(ArgumentError, match="folder must name a folder"):
            call(PLAIN, "", root=data)
    assert not list(tmp_path.iterdir())
