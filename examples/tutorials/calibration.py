#!/usr/bin/env python3

"""Calibration: can the probabilities be believed? Scores, temperature scaling and the width of the prior."""

import copy

import torch

from l2l_niw import NIW, EpisodicModel
from l2l_niw.heads import MetaQDA
from l2l_niw.metrics import calibration
from l2l_niw.models import MLP

SENSORS, CAUSES = 24, 8
MIX = torch.randn(CAUSES, SENSORS, generator=torch.Generator().manual_seed(12)) / CAUSES**0.5


def sample_task(ways=5, shots=2, queries=10):
    """Overlapping classes in a hidden space, seen through 24 sensors. Labels are 0 to ways - 1."""
    centers, noise = torch.randn(ways, CAUSES), 0.2 + 1.3 * torch.rand(CAUSES).pow(2)

    def draw(each):
        hidden = centers.repeat(each, 1) + noise * torch.randn(ways * each, CAUSES)
        return torch.tanh(hidden @ MIX), torch.arange(ways).repeat(each)

    return *draw(shots), *draw(queries)


def train(niw, iterations, tasks_per_batch, steps, meta_lr):
    opt = torch.optim.Adam(niw.parameters(), meta_lr)
    for _ in range(iterations):
        opt.zero_grad()
        for _ in range(tasks_per_batch):
            x, y, x_query, y_query = sample_task()
            learner = niw.clone()
            for _ in range(steps):
                learner.adapt(learner(x, y).nll(y))
            learner(x, y, x_query, y_query).loss(y_query).backward()
        for p in niw.parameters():
            p.grad.data.mul_(1.0 / tasks_per_batch)
        opt.step()


def predict(niw, tasks, steps, samples=10):
    """Probabilities (n, ways) and labels (n,) of all queries, by meta-test inference from the prior's mode."""
    probabilities, labels = [], []
    for x, y, x_query, y_query in tasks:
        post = niw.clone().posterior(lambda network, x=x, y=y: network(x, y).nll(y), steps=steps)
        with torch.no_grad():
            probabilities.append(post.predict(x, y, x_query, samples=samples).probs)
        labels.append(y_query)
    return torch.cat(probabilities), torch.cat(labels)


def main(
    iterations=100, tasks_per_batch=4, tasks=30, width=32, steps=3, lr=0.01, meta_lr=0.003,
    factors=(1.0, 4.0, 8.0, 16.0), seed=0, plot=None,
):  # fmt: skip
    torch.manual_seed(seed)
    niw = NIW(EpisodicModel(MLP(SENSORS, (width, width)), MetaQDA(width)), lr=lr, second_order="none")
    train(niw, iterations, tasks_per_batch, steps, meta_lr)
    validation, test = ([sample_task() for _ in range(tasks)] for _ in range(2))

    # how wide should the prior be? Each width is scored on the validation tasks, and the best is kept
    widths = {}
    for factor in factors:
        scaled = copy.deepcopy(niw)
        scaled.scale_prior_std(factor)
        widths[factor] = calibration.nll(*predict(scaled, validation, steps))
        print(f"prior std x {factor:<5}  validation NLL {widths[factor]:.4f}")
    best = min(widths, key=widths.get)
    niw.scale_prior_std(best)

    # one temperature for all predictions, fitted on validation tasks, never on the test's
    temperature = calibration.fit_temperature(*predict(niw, validation, steps))
    probabilities, labels = predict(niw, test, steps)
    scores = calibration.scores(probabilities, labels, temperature)
    print("  ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    if plot:
        calibration.plot_reliability({"NIW, MetaQDA": calibration.reliability(probabilities, labels)}, plot)
    return {"widths": widths, "best": best, "temperature": temperature, **scores}


if __name__ == "__main__":
    main()
