"""The methods of the Sine-Line benchmark are what their papers and learn2learn say."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch.distributions import Independent, Normal, kl_divergence

import l2l_niw  # noqa: F401  (before learn2learn)
import learn2learn as l2l
from l2l_niw.data import SineLine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sine_line
import sine_line_study
from regression.base import NeuralProcess, Plain, RidgeNet, query_loss
from regression.maml import MAML, Reptile
from regression.niw import NIWMethod, NIWProcess
from regression.pmaml import PMAML
from regression.rows import ROWS
from regression.training import train


def tasks(count=3, seed=0):
    batch = SineLine().sample(count, torch.Generator().manual_seed(seed))
    return type(batch)(*(t.to(torch.get_default_dtype()) for t in batch))


@pytest.mark.parametrize("head", ["linear", "ridge"])
@pytest.mark.parametrize("steps", [1, 3])
def test_maml_is_learn2learn_s(head, steps, double):
    ours, batch = MAML(head, steps, 0.01, compile=False), tasks()
    value = ours.backward(batch)
    found = [p.grad.clone() for p in ours.model.parameters()]
    ours.model.zero_grad()
    maml = l2l.algorithms.MAML(ours.model, lr=0.01, allow_unused=True)
    loss, means = 0.0, []
    for x, y, x_query, y_query in zip(*batch):
        learner = maml.clone()
        for _ in range(steps):
            prediction = learner(x, y)
            learner.adapt((prediction.mean - y).square().mean() if head == "linear" else prediction.nll(y))
        loss = loss + query_loss(learner, x, y, x_query, y_query) / 3
        means.append(learner(x, y, x_query).mean)
    loss.backward()
    assert value == pytest.approx(loss.item())
    for ours_, p in zip(found, ours.model.parameters()):
        assert torch.allclose(ours_, p.grad, atol=1e-10)
    assert torch.allclose(ours.predict(batch).mean, torch.stack(means), atol=1e-10)


def test_ridgenet_s_support_speaks_by_the_evidence_at_its_best_scale(double):
    phi, y, head = torch.randn(5, 3), torch.randn(5, 1), RidgeNet()
    full = np.hstack([phi.numpy(), np.ones((5, 1))])
    kernel = full @ full.T + 0.1 * np.eye(5)

    def minus_log_evidence(log_s):
        return -stats.multivariate_normal(np.zeros(5), np.exp(2 * log_s) * kernel).logpdf(y[:, 0].numpy())

    best = optimize.minimize_scalar(minus_log_evidence).fun
    assert head(phi, y).nll(y).item() == pytest.approx(best / 5)


def test_meta_sgd_begins_as_maml_and_its_rates_have_a_gradient(double):
    torch.manual_seed(1)
    maml, batch = MAML("ridge", 2, 0.01, compile=False), tasks()
    torch.manual_seed(1)
    meta = MAML("ridge", 2, 0.01, learn_lr=True, compile=False)
    assert meta.backward(batch) == pytest.approx(maml.backward(batch))
    rate, step = meta.leaves["log_lr"][0], 1e-5
    slope = rate.grad[3, 0].item()
    values = []
    for sign in (1, -1):
        rate[3, 0] += sign * step
        values.append(meta.backward(batch))
        rate[3, 0] -= sign * step
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-4)


def test_reptile_goes_where_the_inner_steps_end(double):
    reptile, batch = Reptile("linear", 3, 0.01, compile=False), tasks()
    reptile.backward(batch)
    ends = []
    for x, y, x_query, y_query in zip(*batch):
        model = Plain("linear").model
        model.load_state_dict(reptile.model.state_dict())
        opt = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            opt.zero_grad()
            everything = torch.cat([x, x_query]), torch.cat([y, y_query])
            (model(*everything).mean - everything[1]).square().mean().backward()
            opt.step()
        ends.append([p.detach() for p in model.parameters()])
    for (name, p), *others in zip(reptile.model.named_parameters(), *ends):
        if "noise" not in name:
            assert torch.allclose(p.detach() - p.grad, sum(others) / 3, atol=1e-12)


def test_pmaml_s_loss_is_its_paper_s(double):
    method = PMAML("linear", 2, 0.01, beta=0.5, scale=0.1, compile=False)
    for tensors in method.leaves.values():
        for t in tensors:
            t.data.add_(0.1 * torch.randn_like(t))
    batch = tasks(1)
    noise = method.noise(1)
    found = method.objective(method.values(), noise, *batch)
    x, y, x_query, y_query = (t[0] for t in batch)
    model, leaves = method.model, method.values()

    def gradient(weights, x, y):
        named = dict(zip(method.names, weights))
        named = {k: v.detach().requires_grad_() for k, v in named.items()}
        error = (torch.func.functional_call(model, named, (x, y)).mean - y).square().mean()
        return torch.autograd.grad(error, list(named.values()), allow_unused=True, materialize_grads=True)

    def flat(tensors):
        return torch.cat([t.flatten() for t in tensors])

    def law(x, y, rates, scales):
        shifted = flat(leaves["weights"]) - flat(leaves[rates]).exp() * flat(gradient(leaves["weights"], x, y))
        return Independent(Normal(shifted, flat(leaves[scales]).exp()), 1)

    q = law(torch.cat([x, x_query]), torch.cat([y, y_query]), "log_gamma_q", "log_v")
    p = law(x, y, "log_gamma_p", "log_sigma")
    theta = q.mean + q.stddev * noise[0]
    weights = [t.view_as(w) for t, w in zip(theta.split([w.numel() for w in leaves["weights"]]), leaves["weights"])]
    for _ in range(2):
        weights = [w - 0.01 * g for w, g in zip(weights, gradient(weights, x, y))]
    prediction = torch.func.functional_call(model, dict(zip(method.names, weights)), (x, y, x_query))
    assert found.item() == pytest.approx((prediction.nll(y_query) + 0.5 * kl_divergence(q, p) / 45).item())
    assert method.predict(batch).mean.shape == (1, 45, 1)


def test_a_neural_process_is_told_of_each_example_by_the_others(double):
    method, batch = NeuralProcess("anp"), tasks()
    told_query, told = method.tell(batch)
    plain = method.model(batch.x, batch.y, batch.x_query).mean
    assert torch.allclose(method.decoder(told_query).mean, plain)
    rest = [0, 1, 3, 4]
    alone = method.model(batch.x[:, rest], batch.y[:, rest], batch.x[:, 2:3]).mean
    assert torch.allclose(method.decoder(told).mean[:, 2:3], alone)


def test_niw_s_random_decoder_leaves_the_rest_to_all_tasks(double):
    torch.manual_seed(0)
    method, batch = NIWProcess("anp", steps=2), tasks()
    method.backward(batch)
    assert all(p.grad is not None and p.grad.isfinite().all() for group in method.groups(0.1) for p in group["params"])
    owned = [id(p) for group in method.groups(0.1) for p in group["params"]]
    assert len(owned) == len(set(owned))
    assert {id(p) for p in method.model.parameters()} <= set(owned)
    assert method.predict(batch).mean.shape == (3, 45, 1)


@pytest.mark.parametrize("make", [lambda: NIWMethod("ridge"), lambda: Plain("bayesian-ridge")])
def test_a_stopped_training_ends_at_the_same_weights(make, tmp_path, monkeypatch):
    def weights(method):
        return torch.cat([p.detach().flatten() for group in method.groups(0.0) for p in group["params"]])

    torch.manual_seed(0)
    whole = make()
    curve, _ = train(whole, 0.01, 6, seed=0)
    torch.manual_seed(0)
    stopped, path = make(), tmp_path / "run.pt"
    calls, backward = [], stopped.backward
    monkeypatch.setattr("regression.training.SAVE_EVERY", 0.0)

    def interrupted(batch):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return backward(batch)

    stopped.backward = interrupted
    with pytest.raises(KeyboardInterrupt):
        train(stopped, 0.01, 6, seed=0, checkpoint=path)
    torch.manual_seed(99)
    resumed = make()
    again, _ = train(resumed, 0.01, 6, seed=0, checkpoint=path)
    assert torch.equal(weights(resumed), weights(whole))
    assert again == curve
    assert not path.exists()


def test_every_row_has_four_settings_and_a_baseline_that_exists():
    for row in ROWS.values():
        assert len({json.dumps(s) for s in row.space}) == 4
        assert row.baseline is None or row.baseline in ROWS


def test_a_small_run_makes_a_table_and_is_not_run_again(tmp_path, monkeypatch, capsys):
    arguments = ["--rows", "ridge", "bayesian-ridge", "--budget", "8", "--test-tasks", "60", "--seeds", "0", "1"]
    monkeypatch.setattr(sys, "argv", ["sine_line.py", *arguments, "--results", str(tmp_path)])
    sine_line.main()
    table = (tmp_path / "README.md").read_text()
    assert "RidgeNet" in table
    assert "Bayesian ridge" in table
    assert (tmp_path / "curves.png").exists()
    monkeypatch.setattr(sine_line, "run", lambda *a: pytest.fail("it was run again"))
    sine_line.main()
    assert (tmp_path / "README.md").read_text() == table
    for name in ("tasks", "runs"):
        shutil.rmtree(tmp_path / name)
        sine_line.main()
        assert (tmp_path / "README.md").read_text() == table


def test_a_new_row_joins_those_that_are_packed(tmp_path, monkeypatch):
    line = ["sine_line.py", "--budget", "8", "--test-tasks", "60", "--seeds", "0", "--results", str(tmp_path), "--rows"]
    monkeypatch.setattr(sys, "argv", [*line, "ridge"])
    sine_line.main()
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.setattr(sys, "argv", [*line, "ridge", "bayesian-ridge"])
    sine_line.main()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["bayesian-ridge-0.json"]
    assert "RidgeNet" in (tmp_path / "README.md").read_text()


def test_an_infinite_error_is_shown_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sine_line.py", "--rows", "ridge", "--budget", "2", "--test-tasks", "20",
                                      "--seeds", "0", "--results", str(tmp_path)])  # fmt: skip
    sine_line.main()
    run, tasks = tmp_path / "runs" / "ridge-0.json", tmp_path / "tasks" / "ridge-0.npz"
    kept = dict(np.load(tasks))
    kept["mse"][0] = np.inf
    np.savez(tasks, **kept)
    run.write_text(json.dumps({**json.loads(run.read_text()), "mse": np.inf}))
    sine_line.main()
    assert "| RidgeNet | inf | " in (tmp_path / "README.md").read_text()


def test_a_method_that_is_started_again_is_as_one_that_is_new():
    def trained(*seeds):
        sine_line.BUILT.clear()
        for seed in seeds:
            method = sine_line.build("niw-bayesian-ridge", {"outer_lr": 0.01, "lr": 0.003}, seed)
            curve, _ = train(method, 0.01, 3, seed)
        return curve

    assert trained(0, 1) == trained(1)
    assert trained(0) != trained(1)


def test_a_trial_that_diverges_is_written_down_and_not_chosen(tmp_path, monkeypatch):
    def train(method, outer_lr, *rest, **others):
        if outer_lr < 0.008:
            raise RuntimeError("The total norm is non-finite\nand more")
        return [], 0.0

    monkeypatch.setattr(sine_line, "train", train)
    monkeypatch.setattr(sys, "argv", ["sine_line.py", "--tune", "--rows", "ridge", "--results", str(tmp_path)])
    sine_line.main()
    trials = [json.loads(line) for line in (tmp_path / "tuning.jsonl").read_text().splitlines()]
    assert [t.get("error") for t in trials] == ["The total norm is non-finite"] * 3 + [None]
    assert sine_line.settings_of("ridge", tmp_path) == {"outer_lr": 0.008}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A small one, and its table."""
    values = {"steps": [1, 2], "burn_in": [0], "n0": [3.0], "samples": [1, 2], "samples_ggn": [1, 2]}
    monkeypatch.setattr(sine_line_study, "SAMPLES", [1, 2])
    monkeypatch.setattr(sine_line_study, "VALUES", values)
    monkeypatch.setattr(sine_line_study, "BASE", {"steps": 2, "burn_in": 1, "samples": 2, "n0": None})
    arguments = ["--budget", "2", "--test-tasks", "20", "--seeds", "0", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["sine_line_study.py", *arguments])

    def call():
        sine_line_study.main()
        return (tmp_path / "README.md").read_text()

    return call


def test_the_study_trains_each_setting_once_and_draws_all_of_them(study, tmp_path, monkeypatch):
    table = study()
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert len(runs) == 7  # two of the base and two of ggn, with one posterior sample and with two
    assert table.count("| posterior samples |") == 2
    assert table.count("| posterior samples, ggn |") == 2
    monkeypatch.setattr(sine_line_study, "run", lambda *a: pytest.fail("it was run again"))
    study()
    assert (tmp_path / "study.png").exists()


def test_a_setting_of_the_study_that_diverges_is_shown_as_such(study, monkeypatch):
    def train(method, *rest, **options):
        if method.niw.options.burn_in == 0:
            raise RuntimeError("it diverged")
        return [1.0], 0.5

    monkeypatch.setattr(sine_line_study, "train", train)
    table = study()
    assert "| burn-in, of 5 steps | 0 | 1 diverged |" in table
    assert table.count("diverged") == 2  # one step has no burn-in either
