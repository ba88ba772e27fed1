"""The pose benchmark: every row trains and predicts, runs resume, the search chooses, and the page is made again."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pose_cases import batches, built, call, tiny

import pose
from pose_estimation import search, training
from pose_estimation.columns import COLUMNS, tasksets_of
from pose_estimation.page import paired, report
from pose_estimation.rows import ROWS
from pose_estimation.runs import Job, execute, load
from pose_estimation.scoring import SAMPLES, calibration, score, score_batch
from pose_estimation.spaces import Components
from pose_estimation.training import Training

from l2l_niw.errors import ArgumentError, CheckpointError, DataError, LossError
from l2l_niw.heads import LeaveOneOut
from l2l_niw.heads.predictions import GaussianMixture

TRAINED = [method for method in ROWS if ROWS[method].space]
pytestmark = pytest.mark.filterwarnings("ignore:NIW")


def weights(method):
    return {name: value.clone() for name, value in method.module.state_dict().items()}


@pytest.mark.parametrize("method", ROWS)
@pytest.mark.parametrize("name", COLUMNS)
def test_every_row_takes_a_step_and_predicts_a_density(name, method):
    column = tiny(name)
    train, test, poses = batches(column)
    row = built(column, method)
    if row.module is not None:
        before, run = weights(row), Training(row, column, 1e-3)
        run.opt.zero_grad()
        assert math.isfinite(row.backward(train))
        still = [key for key, p in row.module.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not still
        run.opt.step()
        assert any(not torch.equal(value, before[key]) for key, value in weights(row).items())
    found = row.predict(test)
    assert found.means.shape == (2, 4, found.means.shape[2], column.space.width)
    assert column.space.log_density(found, poses).isfinite().all()
    assert not any(part.requires_grad for part in found)


@pytest.mark.parametrize("name", COLUMNS)
def test_densities_of_poses_integrate_to_one(name):
    space = COLUMNS[name].space
    means, scales = torch.randn(1, 3, space.width), 0.2 + torch.rand(1, 3, space.width)
    found = Components(means.double(), scales.double(), torch.randn(1, 3).double())
    if name == "position":  # a grid that is wider than the image
        side = torch.arange(-100, 164, 1.0).double()
        poses = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).flatten(0, 1)
        volume = len(poses)
    else:
        poses = torch.nn.functional.normalize(torch.randn(100_000, space.width).double(), dim=-1)
        volume = {2: 2 * math.pi, 4: 2 * math.pi**2}[space.width]
    density = space.log_density(Components(*(part[0] for part in found)), poses).exp() * volume
    error = 0.001 if name == "position" else 4 * density.std().item() / len(density) ** 0.5
    assert density.mean().item() == pytest.approx(1, abs=error)


@pytest.mark.parametrize("name", COLUMNS)
def test_of_predictions_that_are_true_the_levels_are_uniform(name):
    space = COLUMNS[name].space
    found = Components(
        torch.randn(400, 5, 2, space.width), 0.1 + torch.rand(400, 5, 2, space.width), torch.zeros(400, 5, 2)
    )
    y = space.decode(GaussianMixture(*found).sample())
    errors, nll, rank = score_batch(found, y, space)
    assert (errors.shape, nll.shape, rank.shape) == ((len(space.errors), 400), (400,), (400, 5))
    summary = calibration(rank)
    assert summary["r_ece"] < 0.02
    assert summary["coverage"] == pytest.approx(0.9, abs=0.03)
    assert rank.max() <= SAMPLES


def test_what_networks_are_given_of_a_position_comes_back():
    space, y = COLUMNS["position"].space, torch.tensor([[0.0, 63.0], [31.5, 7.0]])
    torch.testing.assert_close(space.decode(space.encode(y)), y)
    assert space.encode(y).abs().max() <= 2


def test_the_nearest_view_is_that_of_the_same_pixels():
    column = tiny("azimuth")
    _, test, _ = batches(column)
    found = built(column, "nearest").predict(test._replace(x_query=test.x.flip(1)))
    torch.testing.assert_close(found.mean(), test.y.flip(1).double())


def test_the_constant_is_the_support_s_mean_and_spread():
    column = tiny("position")
    _, test, _ = batches(column)
    found = built(column, "constant").predict(test)
    torch.testing.assert_close(found.mean(), test.y.double().mean(1, keepdim=True).expand(-1, 4, -1))
    torch.testing.assert_close(found.scales[:, 0, 0], test.y.double().std(1) * (1 + 1 / test.y.shape[1]) ** 0.5)


def test_with_and_without_niw_have_the_same_network():
    column, shapes = tiny("azimuth"), {}
    for method in TRAINED:
        own = built(column, method).module
        shapes[method] = [
            tuple(p.shape) for name, p in own.named_parameters() if "hyper" not in name and "raw" not in name
        ]
    for method in TRAINED:
        baseline = ROWS[method].baseline
        if baseline in ("cr", "anp", "anp-fcl", "cnp-max", "cnp-mean", "cnp-ba", "cnp-fcl") and "mixture" not in method:
            assert sorted(shapes[method]) == sorted(shapes[baseline]), method


def test_functional_contrast_trains_the_common_network():
    column = tiny("azimuth")
    train, _, _ = batches(column)
    torch.manual_seed(0)
    with_penalty = built(column, "niw-cnp-fcl")
    torch.manual_seed(0)
    without = built(column, "niw-cnp-max")
    assert isinstance(with_penalty.niw.module.head, LeaveOneOut)
    for row in (with_penalty, without):
        torch.manual_seed(1)
        row.backward(train)
    ours, theirs = (row.niw.module.head.head for row in (with_penalty, without))
    first = next(ours.head.encoder.parameters()).grad, next(theirs.encoder.parameters()).grad
    assert not torch.allclose(*first)


def test_which_weights_are_random():
    column = tiny("azimuth")
    chosen = [set(built(column, method).niw.prior().mean) for method in ("niw-cr", "niw-cr-all")]
    assert [sorted(names) for names in chosen] == [
        ["backbone.1.bias", "backbone.1.weight"],
        sorted(
            f"backbone.{layer}.{part}" for layer in ("first", "second", "third", "out") for part in ("weight", "bias")
        ),
    ]


@pytest.mark.parametrize("method", ["cr", "niw-anp", "niw-maml", "niw-cr-rank"])
def test_a_run_that_was_killed_resumes_with_the_same_weights(method, tmp_path, monkeypatch):
    job, root = Job(tiny("azimuth"), method, 0, dict(ROWS[method].space[0])), tmp_path
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    execute(job, root / "whole")
    step = Training.step

    def killed(self, tasks):
        if self.done == 3:
            raise MemoryError
        step(self, tasks)

    monkeypatch.setattr(Training, "step", killed)
    with pytest.raises(MemoryError):
        execute(job, root / "stopped")
    monkeypatch.setattr(Training, "step", step)
    execute(job, root / "stopped")
    one, other = (torch.load(root / name / "checkpoint.pt", weights_only=True) for name in ("whole", "stopped"))
    assert one["module"].keys() == other["module"].keys()
    assert all(torch.equal(value, other["module"][name]) for name, value in one["module"].items())
    assert [line["error"] for line in one["log"]] == [line["error"] for line in other["log"]]
    with np.load(root / "whole" / "tasks.npz") as a, np.load(root / "stopped" / "tasks.npz") as b:
        assert all(np.array_equal(a[name], b[name]) for name in a.files)


def test_a_run_with_other_settings_is_refused(tmp_path):
    execute(Job(tiny("azimuth"), "cr", 0, {"lr": 0.001}), tmp_path)
    with pytest.raises(ArgumentError, match="is of a run with other settings. Move it away"):
        execute(Job(tiny("azimuth"), "cr", 0, {"lr": 0.002}), tmp_path)


def test_the_page_is_the_same_from_packed_results_and_what_is_packed_is_not_run_again(tmp_path, monkeypatch, capsys):
    chosen = ("--columns", "azimuth", "--methods", "constant", "cr", "niw-cr", "--seeds", "0", "1")
    call(monkeypatch, tmp_path, *chosen)
    folder = tmp_path / "azimuth"
    first = (folder / "README.md").read_text()
    assert sorted(path.name for path in (folder / "runs").iterdir()) == [
        "constant-0",
        "cr-0",
        "cr-1",
        "niw-cr-0",
        "niw-cr-1",
    ]
    for title in ("the support's mean", "| C+R |", "| NIW, C+R | C+R |"):
        assert title in first
    assert all((folder / name).stat().st_size > 1000 for name in ("views.png", "validation.png"))
    shutil.rmtree(folder / "runs")
    monkeypatch.setattr(pose, "execute", lambda *_: pytest.fail("a packed run was run again"))
    call(monkeypatch, tmp_path, *chosen)
    assert (folder / "README.md").read_text() == first
    call(monkeypatch, tmp_path, "--report", *chosen)
    assert capsys.readouterr().out.strip().endswith(first.strip())
    (folder / "notes.md").write_text("NIW wins.\n\n## How\nBy hand.\n")
    found = report(folder)
    assert found.index("NIW wins.") < found.index("| C+R |") < found.index("By hand.")


def test_differences_are_of_the_same_seeds_and_tasks(tmp_path):
    for seed in (0, 1):
        execute(Job(tiny("position"), "nearest", seed, {}), tmp_path / "runs" / f"nearest-{seed}")
        execute(Job(tiny("position"), "constant", seed, {}), tmp_path / "runs" / f"constant-{seed}")
    found, _ = load(tmp_path)
    one, other = ([found[method, seed] for seed in (1, 0)] for method in ("nearest", "constant"))
    for what, place in (("error", ("errors", 0)), ("nll", ("nll",))):
        values = paired(one, other[1:], what, "cross")
        arrays = [run.arrays[place[0]][1] for run in (found["nearest", 0], found["constant", 0])]
        expected = arrays[0] - arrays[1] if what == "nll" else arrays[0][0] - arrays[1][0]
        assert values.shape == (1, 3)
        np.testing.assert_allclose(values[0], expected, rtol=1e-6)


def test_runs_of_other_budgets_are_no_table(tmp_path):
    for seed, tasks in ((0, 3), (1, 2)):
        execute(Job(tiny("azimuth", test_tasks=tasks), "nearest", seed, {}), tmp_path / "runs" / f"nearest-{seed}")
    with pytest.raises(ArgumentError, match="has runs that differ in test_tasks: no table"):
        load(tmp_path)


def test_the_search_keeps_the_setting_with_the_lowest_validation_error(tmp_path, monkeypatch):
    errors = {0.001: 9.0, 0.0005: 3.0, 0.002: 5.0}
    tried = []

    def trained(job, folder, root):
        tried.append((job.settings["lr"], job.column.batches, job.column.validations))
        if job.settings["lr"] not in errors:
            raise LossError("batch 1: a gradient is not finite.")
        return None, None, [{"error": errors[job.settings["lr"]], "nll": 1.0}], 0.5

    monkeypatch.setattr(search, "trained", trained)
    call(monkeypatch, tmp_path, "--tune", "--columns", "azimuth", "--methods", "cr", "constant")
    assert sorted(tried) == [(lr, 1, 1) for lr in (0.0005, 0.001, 0.002, 0.004)]
    folder = tmp_path / "azimuth"
    assert json.loads((folder / "settings.json").read_text()) == {"cr": {"lr": 0.0005}}
    assert [line["error"] for line in json.loads((folder / "search.json").read_text())["cr"]] == [9.0, 3.0, 5.0, None]
    call(monkeypatch, tmp_path, "--tune", "--columns", "azimuth", "--methods", "cr")
    assert len(tried) == 4  # trials that are there are not run again
    call(monkeypatch, tmp_path, "--columns", "azimuth", "--methods", "cr", "--seeds", "3")
    assert json.loads((folder / "runs" / "cr-3" / "config.json").read_text())["settings"] == {"lr": 0.0005}


def test_a_trial_that_failed_for_another_reason_is_none(tmp_path, monkeypatch):
    def trained(job, folder, root):
        raise CheckpointError("checkpoint.pt cannot be read.")

    monkeypatch.setattr(search, "trained", trained)
    with pytest.raises(CheckpointError):
        call(monkeypatch, tmp_path, "--tune", "--columns", "azimuth", "--methods", "cr")
    assert not list(tmp_path.glob("**/trial.json"))


def test_every_row_has_four_settings_or_none():
    for method, row in ROWS.items():
        assert len(row.space) == (0 if method in ("constant", "nearest") else 4)
        assert len({json.dumps(settings) for settings in row.space}) == len(row.space)
        assert row.baseline is None or row.baseline in ROWS


def test_training_is_augmented_as_in_the_paper_and_tests_are_the_same_for_all_seeds():
    for name, targets in (("azimuth", True), ("rotation", True), ("position", False)):
        one, other = (tasksets_of(tiny(name), seed) for seed in (0, 1))
        assert (one.train.images, one.train.targets) == (True, targets)
        assert getattr(one.train.taskset, "randomised", False) == (name == "rotation")
        assert torch.equal(one.test[0].x, other.test[0].x)
        assert not torch.equal(one.train[0].x_query, other.train[0].x_query)
        assert one.test[0].x.shape[0] == one.cross[0].x.shape[0] == 4


@pytest.mark.parametrize(
    ("how", "suffix", "left_out"), [("data", "da", "task augmentation"), ("none", "plain", "augmentation")]
)
def test_with_less_augmentation_results_have_a_folder_of_their_own(how, suffix, left_out, tmp_path, monkeypatch):
    call(monkeypatch, tmp_path, "--methods", "nearest", "--columns", "azimuth", "position", "--augmentation", how)
    position = "position" if how == "data" else "position-plain"  # positions have no task augmentation anyway
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"azimuth-{suffix}", position]
    text = (tmp_path / f"azimuth-{suffix}" / "README.md").read_text()
    assert text.startswith(f"# Few-shot pose estimation: azimuths, without {left_out}\n")
    assert f"--columns azimuth --augmentation {how}`" in text
    train = tasksets_of(tiny("azimuth").augmented(how), 0).train
    assert (train.images, train.targets) == (how == "data", False)


def test_validation_leaves_training_s_random_numbers_alone():
    column = tiny("azimuth")
    tasksets, run = tasksets_of(column, 0), Training(built(column, "niw-cr"), column, 1e-3)
    run.step(tasksets.train.batch(2))
    before = torch.get_rng_state()
    run.validate(tasksets.validation)
    assert torch.equal(before, torch.get_rng_state())


def test_predictions_that_are_not_finite_are_an_error():
    column = tiny("azimuth")
    row = built(column, "anp")
    with torch.no_grad():
        row.model.backbone[1].bias.fill_(float("nan"))
    with pytest.raises(LossError, match="predictions are not finite"):
        score(row.predict, tasksets_of(column, 0).test, column.space, 2)


def test_missing_furniture_says_what_to_do(tmp_path, monkeypatch):
    line = ["pose.py", "--data", str(tmp_path), "--results", str(tmp_path / "r"), "--methods", "nearest"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(DataError, match="No furniture"):
        pose.main()
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_the_script_helps_and_runs_in_processes(tmp_path):
    script = str(Path(pose.__file__))
    text = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--tune" in text
    assert "niw-cr-mixture" in "".join(text.split())  # however wide the terminal
    line = [sys.executable, script, "--quick", "--results", str(tmp_path), "--columns", "position", "--jobs", "2"]
    done = subprocess.run([*line, "--methods", "nearest", "cr"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| nearest view, in pixels |" in done.stdout
    refused = subprocess.run([*line[:-2], "--report", "--columns", "azimuth"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "pose.py:" in refused.stderr
    assert "has no results yet" in refused.stderr
