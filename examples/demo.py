#!/usr/bin/env python3

"""
NIW beside MAML on noisy sine waves: trains both with the same loop, prints a table and saves a plot.

    python examples/demo.py                     # about a minute on two cores
    python examples/demo.py --iterations 2000

Both see the same tasks: amplitude in [0.1, 5], phase in [0, pi], noise 0.3 on every target; five support points.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn, optim
from tqdm import tqdm

from l2l_niw import NIW

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds

NOISE, SHOTS, STEPS, LR = 0.3, 5, 5, 0.01
LEVEL = 1.645  # a Gaussian's two-sided 90%
METHODS = {
    "MAML": lambda model: l2l.algorithms.MAML(model, lr=LR),
    "NIW": lambda model: NIW(model, lr=LR, temperature=0.05),
}


def sample_task(queries, generator):
    """Support and query of one wave, with noise on both."""
    amplitude = 0.1 + 4.9 * torch.rand(1, generator=generator)
    phase = torch.pi * torch.rand(1, generator=generator)
    x = 10 * torch.rand(SHOTS + queries, 1, generator=generator) - 5
    y = amplitude * torch.sin(x + phase) + NOISE * torch.randn(x.shape, generator=generator)
    return x[:SHOTS], y[:SHOTS], x[SHOTS:], y[SHOTS:]


def nll(outputs, y):
    """Mean negative log-likelihood of the targets, up to a constant."""
    return 0.5 * ((outputs - y) / NOISE).square().mean()


def adapt(wrapper, x, y):
    learner = wrapper.clone()
    for _ in range(STEPS):
        learner.adapt(NOISE**2 * nll(learner(x), y))
    return learner


def train(name, wrapper, iterations, meta_batch, seed):
    generator = torch.Generator().manual_seed(seed)
    opt = optim.Adam(wrapper.parameters(), 0.003)
    bar = tqdm(range(iterations), desc=f"{name:>4}")
    average = None
    for _ in bar:
        opt.zero_grad()
        total = 0.0
        for _ in range(meta_batch):
            x, y, x_query, y_query = sample_task(15, generator)
            learner = adapt(wrapper, x, y)
            loss = NOISE**2 * nll(learner(x_query), y_query)
            loss.backward()
            total += loss.item() / meta_batch
        for p in wrapper.parameters():
            p.grad.data.mul_(1.0 / meta_batch)
        opt.step()
        average = total if average is None else 0.98 * average + 0.02 * total
        bar.set_postfix(loss=f"{average:.3f}")


def predict(wrapper, x, y, x_query, samples):
    """Mean and standard deviation of the predictive: the networks' spread, if any, and the noise."""
    learner = adapt(wrapper, x, y)
    with torch.no_grad():
        if isinstance(wrapper, NIW):
            outputs = learner.posterior().predict(x_query, samples=samples)
            return outputs.mean(0), (outputs.var(0) + NOISE**2).sqrt()
        return learner(x_query), torch.full_like(x_query, NOISE)


def score(wrapper, tasks, seed):
    generator = torch.Generator().manual_seed(seed)
    errors, nlls, covered = [], [], []
    for _ in range(tasks):
        x, y, x_query, y_query = sample_task(45, generator)
        mean, std = predict(wrapper, x, y, x_query, samples=20)
        errors.append((mean - y_query).square().mean())
        nlls.append(-torch.distributions.Normal(mean, std).log_prob(y_query).mean())
        covered.append(((mean - y_query).abs() < LEVEL * std).float().mean())
    errors, nlls, covered = (torch.stack(values) for values in (errors, nlls, covered))
    return errors.mean(), 1.96 * errors.std() / tasks**0.5, nlls.mean(), covered.mean()


def plot(wrappers, path, seed, columns=3):
    """One column a task, one row a method: support, truth, predictive mean and its 90% band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(wrappers), columns, figsize=(4 * columns, 3 * len(wrappers)), sharex=True,
                                sharey="col", squeeze=False)
    grid = torch.linspace(-5, 5, 200).unsqueeze(1)
    for column in range(columns):
        generator = torch.Generator().manual_seed(seed + column)
        amplitude = 0.1 + 4.9 * torch.rand(1, generator=generator)
        phase = torch.pi * torch.rand(1, generator=generator)
        x, y, _, _ = sample_task(0, torch.Generator().manual_seed(seed + column))
        for row, (name, wrapper) in enumerate(wrappers.items()):
            mean, std = predict(wrapper, x, y, grid, samples=50)
            axis = axes[row][column]
            low, high = mean - LEVEL * std, mean + LEVEL * std
            axis.fill_between(grid.flatten(), low.flatten(), high.flatten(), alpha=0.3, label="90% band")
            axis.plot(grid, mean, label="prediction")
            axis.plot(grid, amplitude * torch.sin(grid + phase), "k--", lw=1, label="truth")
            axis.plot(x, y, "ko", ms=5, label="support")
            axis.set_title(f"{name}, task {column + 1}")
    axes[0][0].legend(loc="best", fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(iterations=500, meta_batch=8, test_tasks=300, seed=0, out=Path("demo")):
    rows, wrappers = [], {}
    for name, build in METHODS.items():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
        wrappers[name] = build(model)
        began = time.perf_counter()
        train(name, wrappers[name], iterations, meta_batch, seed)
        seconds = time.perf_counter() - began
        mse, interval, mean_nll, coverage = score(wrappers[name], test_tasks, seed + 1)
        rows.append(f"{name:8} {mse:7.3f} ± {interval:.3f} {mean_nll:8.2f} {100 * coverage:9.0f}% {seconds:9.1f}")
    plot(wrappers, out / "predictions.png", seed + 2)
    print(f"\n{'method':8} {'MSE (95% interval)':>15} {'NLL':>7} {'in 90% band':>10} {'train, s':>9}")
    print("\n".join(rows))
    print(f"\n{test_tasks} new tasks, {iterations} batches of {meta_batch} tasks each. The noise alone costs an MSE of "
          f"{NOISE**2:.2f}.\nPlot: {out / 'predictions.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=500, help="meta-batches of training, for each method")
    parser.add_argument("--seed", type=int, default=0, help="makes a run repeatable")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the plot")
    args = parser.parse_args()
    main(iterations=args.iterations, seed=args.seed, out=args.out)
