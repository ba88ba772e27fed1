#!/usr/bin/env python3

"""
NIW beside MAML on a small regression whose Bayes-optimal answer is known: a table and a plot.

    python examples/known_population.py                     # about a minute on two cores
    python examples/known_population.py --iterations 300

A task is a random periodic curve, y = features(x) . theta_i + noise, with theta_i ~ N(mu, Sigma) and Sigma falling off
with the frequency. MAML learns where tasks begin; NIW also learns how far each weight strays from there, so that five
points of support say how much is known and where. Both see the same tasks and the same linear model.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn, optim
from tqdm import tqdm

from l2l_niw import NIW
from l2l_niw.inference.curvature import GGN

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds

NOISE, SHOTS, QUERIES = 0.3, 5, 35
LEVEL = 1.645  # a Gaussian's two-sided 90%
FREQUENCIES = torch.arange(1, 6)
STD = torch.cat([torch.ones(1), *(2 * [1.5 / (1 + FREQUENCIES)])])
MEAN = torch.cat([torch.tensor([0.5]), *(2 * [torch.where(FREQUENCIES < 3, 1.0, 0.0)])])


def features(x):
    """Constant, cosines and sines: shape (n, 11)."""
    angles = x * FREQUENCIES
    return torch.cat([torch.ones_like(x), angles.cos(), angles.sin()], dim=1)


def sample_task(points, generator):
    """Inputs' features, noisy targets, and the task's weights."""
    theta = MEAN + STD * torch.randn(len(MEAN), generator=generator)
    x = (2 * torch.rand(points, 1, generator=generator) - 1) * torch.pi
    phi = features(x)
    return x, phi, phi @ theta + NOISE * torch.randn(points, generator=generator), theta


def mean_nll(outputs, y):
    """Mean negative log-likelihood, up to a constant."""
    return 0.5 * ((outputs.squeeze(-1) - y) / NOISE).square().mean()


class MAMLRow:
    """MAML on support and query; its predictive has the noise's width everywhere."""

    def __init__(self, model):
        self.wrapper = l2l.algorithms.MAML(model, lr=0.02)

    def adapt(self, phi, y):
        learner = self.wrapper.clone()
        for _ in range(5):
            learner.adapt(mean_nll(learner(phi), y))
        return learner

    def backward(self, phi, y):
        loss = mean_nll(self.adapt(phi[:SHOTS], y[:SHOTS])(phi[SHOTS:]), y[SHOTS:])
        loss.backward()
        return loss.item()

    def predict(self, phi, y, phi_query):
        with torch.enable_grad():
            learner = self.adapt(phi, y)
        return learner(phi_query).squeeze(-1), torch.full((len(phi_query),), NOISE)


class NIWRow:
    """NIW as the paper trains it: chains on a task's whole data, at temperature 1, with real curvature."""

    def __init__(self, model):
        self.wrapper = NIW(
            model,
            lr=0.02,
            inference="closed_form",
            temperature=1.0,
            prior_precision=1.0,
            curvature=GGN("gaussian", NOISE),
            average_iterates=True,
            burn_in=15,
            add_kl_gradient=False,
            second_order="none",
            learn_step_sizes=False,
        )

    def backward(self, phi, y):
        learner = self.wrapper.clone()
        for _ in range(20):
            learner.adapt(mean_nll(learner(phi), y))
        post = learner.posterior()
        loss = mean_nll(post.network(post.rsample())(phi), y)
        learner.objective(loss, n=len(phi)).backward()
        return loss.item()

    def predict(self, phi, y, phi_query):
        post = self.wrapper.clone().posterior(lambda network: mean_nll(network(phi), y), steps=150)
        outputs = post.predict(phi_query, samples=50).squeeze(-1)
        return outputs.mean(0), (outputs.var(0) + NOISE**2).sqrt()


class BayesRow:
    """The exact posterior under the true mu and Sigma: nobody can do better."""

    def predict(self, phi, y, phi_query):
        precision = phi.T @ phi / NOISE**2 + torch.diag(1 / STD**2)
        mean = torch.linalg.solve(precision, phi.T @ y / NOISE**2 + MEAN / STD**2)
        variance = (phi_query @ torch.linalg.inv(precision) * phi_query).sum(1)
        return phi_query @ mean, (variance + NOISE**2).sqrt()


def train(name, row, iterations, meta_batch, seed):
    generator = torch.Generator().manual_seed(seed)
    opt = optim.Adam(row.wrapper.parameters(), 0.05)
    schedule = optim.lr_scheduler.CosineAnnealingLR(opt, iterations)
    bar = tqdm(range(iterations), desc=f"{name:>4}")
    average = None
    for _ in bar:
        opt.zero_grad()
        tasks = [sample_task(SHOTS + QUERIES, generator) for _ in range(meta_batch)]
        loss = sum(row.backward(phi, y) for _, phi, y, _ in tasks) / meta_batch
        for p in row.wrapper.parameters():
            p.grad.data.mul_(1.0 / meta_batch)
        opt.step()
        schedule.step()
        average = loss if average is None else 0.95 * average + 0.05 * loss
        bar.set_postfix(loss=f"{average:.3f}")


@torch.no_grad()
def score(row, tasks, seed):
    """MSE with its 95% interval, NLL, and how many targets fall into the 90% band."""
    generator = torch.Generator().manual_seed(seed)
    errors, nlls, covered = [], [], []
    for _ in range(tasks):
        _, phi, y, _ = sample_task(SHOTS + QUERIES, generator)
        mean, std = row.predict(phi[:SHOTS], y[:SHOTS], phi[SHOTS:])
        errors.append((mean - y[SHOTS:]).square().mean())
        nlls.append(-torch.distributions.Normal(mean, std).log_prob(y[SHOTS:]).mean())
        covered.append(((mean - y[SHOTS:]).abs() < LEVEL * std).float().mean())
    errors, nlls, covered = (torch.stack(values) for values in (errors, nlls, covered))
    return errors.mean(), 1.96 * errors.std() / tasks**0.5, nlls.mean(), covered.mean()


@torch.no_grad()
def plot(rows, path, seed, columns=3):
    """One column per task, one row per method: support, truth, predictive mean and its 90% band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (4 * columns, 2.8 * len(rows))
    figure, axes = plt.subplots(len(rows), columns, figsize=size, sharex=True, sharey="col", squeeze=False)
    grid = torch.linspace(-torch.pi, torch.pi, 200).unsqueeze(1)
    for column in range(columns):
        x, phi, y, theta = sample_task(SHOTS, torch.Generator().manual_seed(seed + column))
        for axis, (name, row) in zip(axes[:, column], rows.items()):
            mean, std = row.predict(phi, y, features(grid))
            axis.fill_between(grid.flatten(), mean - LEVEL * std, mean + LEVEL * std, alpha=0.3, label="90% band")
            axis.plot(grid, mean, label="prediction")
            axis.plot(grid, features(grid) @ theta, "k--", lw=1, label="truth")
            axis.plot(x, y, "ko", ms=5, label="support")
            axis.set_title(f"{name}, task {column + 1}")
    axes[0][0].legend(loc="best", fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(iterations=150, meta_batch=16, test_tasks=200, seed=0, out=Path("known_population")):
    torch.manual_seed(seed)
    rows = {name: make(nn.Linear(len(MEAN), 1, bias=False)) for name, make in (("MAML", MAMLRow), ("NIW", NIWRow))}
    seconds = {}
    for name, row in rows.items():
        began = time.perf_counter()
        train(name, row, iterations, meta_batch, seed)
        seconds[name] = f"{time.perf_counter() - began:.1f}"
    rows["Bayes"] = BayesRow()
    print(f"\n{'method':8} {'MSE (95% interval)':>18} {'NLL':>8} {'in 90% band':>12} {'train, s':>9}")
    for name, row in rows.items():
        mse, interval, nll, coverage = score(row, test_tasks, seed + 1)
        error = f"{mse:.3f} ± {interval:.3f}"
        print(f"{name:8} {error:>18} {nll:8.2f} {100 * coverage:11.0f}% {seconds.get(name, '-'):>9}")
    plot(rows, out / "predictions.png", seed + 2)
    learned = rows["NIW"].wrapper.hyper.log_variance[0].detach().exp().sqrt().flatten()
    print("\nhow far each weight strays between tasks: constant, cosines, sines")
    print("truth   " + " ".join(f"{s:.2f}" for s in STD))
    print("NIW     " + " ".join(f"{s:.2f}" for s in learned))
    print(
        f"\n{test_tasks} new tasks of {SHOTS} support points; {iterations} batches of {meta_batch} tasks. "
        f"Plot: {out / 'predictions.png'}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=150, help="meta-batches of training, for each method")
    parser.add_argument("--seed", type=int, default=0, help="makes a run repeatable")
    parser.add_argument("--out", type=Path, default=Path("known_population"), help="folder for the plot")
    args = parser.parse_args()
    main(iterations=args.iterations, seed=args.seed, out=args.out)
