#!/usr/bin/env python3

"""Heads: the same backbone and the same loop with three heads under NIW. Synthetic classes, no download."""

import torch

from l2l_niw import NIW, EpisodicModel
from l2l_niw.heads import MetaQDA, NearestCentroid, Ridge
from l2l_niw.models import MLP

SENSORS, CAUSES = 24, 8
MIX = torch.randn(CAUSES, SENSORS, generator=torch.Generator().manual_seed(12)) / CAUSES**0.5


def sample_task(ways=5, shots=5, queries=10):
    """Classes are points in a hidden space, seen through 24 sensors; which causes are noisy differs per task."""
    centers, noise = torch.randn(ways, CAUSES), 0.2 + 1.3 * torch.rand(CAUSES).pow(2)
    labels = torch.randperm(100)[:ways]  # any integers

    def draw(each):
        hidden = centers.repeat(each, 1) + noise * torch.randn(ways * each, CAUSES)
        return torch.tanh(hidden @ MIX), labels.repeat(each)

    return *draw(shots), *draw(queries)


def adapted(niw, task, steps):
    """A learner after its inner steps, which maximise what the support says of its own labels."""
    x, y, _, _ = task
    learner = niw.clone()
    for _ in range(steps):
        learner.adapt(learner(x, y).nll(y))
    return learner


def main(iterations=80, tasks_per_batch=4, test_tasks=60, width=32, steps=3, lr=0.05, meta_lr=0.003, seed=0):
    heads = {
        "nearest centroid": lambda: NearestCentroid("euclidean", scale=0.1, learn_scale=True),
        "ridge": lambda: Ridge(learn_lam=True),
        "MetaQDA": lambda: MetaQDA(width),
    }
    results = {}
    for name, make in heads.items():
        torch.manual_seed(seed)
        niw = NIW(EpisodicModel(MLP(SENSORS, (width, width)), make()), lr=lr, second_order="none")
        opt = torch.optim.Adam(niw.parameters(), meta_lr)
        for _ in range(iterations):
            opt.zero_grad()
            for _ in range(tasks_per_batch):
                x, y, x_query, y_query = task = sample_task()
                learner = adapted(niw, task, steps)
                learner(x, y, x_query, y_query).loss(y_query).backward()
            for p in niw.parameters():
                p.grad.data.mul_(1.0 / tasks_per_batch)
            opt.step()

        torch.manual_seed(seed + 1)  # the same test tasks for every head
        nll, accuracy = [], []
        for task in [sample_task() for _ in range(test_tasks)]:
            x, y, x_query, y_query = task
            learner = adapted(niw, task, steps)
            with torch.no_grad():
                prediction = learner.posterior().predict(x, y, x_query, samples=10)  # one distribution
                nll.append(prediction.nll(y_query).item())
                accuracy.append((prediction.mode == y_query).float().mean().item())
        results[name] = {"nll": sum(nll) / test_tasks, "accuracy": sum(accuracy) / test_tasks}
        print(f"{name:18s} accuracy {100 * results[name]['accuracy']:.1f}%   NLL {results[name]['nll']:.3f}")
    return results


if __name__ == "__main__":
    main()
