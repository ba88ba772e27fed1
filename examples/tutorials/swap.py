#!/usr/bin/env python3

"""The swap: one loop of learn2learn's, run by MAML and by NIW. Sine waves, no download."""

import torch
from torch import nn, optim

from l2l_niw import NIW

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def sample_task(shots, generator):
    """A sine wave of random amplitude and phase: `shots` points of support, and as many of query."""
    x = 10 * torch.rand(2 * shots, 1, generator=generator) - 5
    amplitude, phase = torch.rand(2, generator=generator)
    y = (0.1 + 4.9 * amplitude) * torch.sin(x + torch.pi * phase)
    return x[:shots], y[:shots], x[shots:], y[shots:]


# --8<-- [start:loop]
def query_loss(wrapper, task, steps, lossfn):
    x, y, x_query, y_query = task
    learner = wrapper.clone()
    for _ in range(steps):
        learner.adapt(lossfn(learner(x), y))
    return lossfn(learner(x_query), y_query)


def train(wrapper, generator, iterations, tasks_per_batch, shots, steps, meta_lr):
    """learn2learn's MAML loop, unchanged."""
    opt = optim.Adam(wrapper.parameters(), meta_lr)
    lossfn = nn.MSELoss(reduction="mean")
    for _ in range(iterations):
        opt.zero_grad()
        for _ in range(tasks_per_batch):
            query_loss(wrapper, sample_task(shots, generator), steps, lossfn).backward()
        for p in wrapper.parameters():
            p.grad.data.mul_(1.0 / tasks_per_batch)
        opt.step()


# --8<-- [end:loop]


def main(iterations=120, tasks_per_batch=8, test_tasks=50, shots=10, steps=5, lr=0.01, meta_lr=0.003, seed=0):
    results = {}
    for method in ("MAML", "NIW"):
        torch.manual_seed(seed)  # the same initial weights
        generator = torch.Generator().manual_seed(seed)  # the same tasks
        test = [sample_task(shots, generator) for _ in range(test_tasks)]
        model = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        wrapper = l2l.algorithms.MAML(model, lr=lr) if method == "MAML" else NIW(model, lr=lr)

        def score(wrapper=wrapper, test=test):
            return sum(query_loss(wrapper, task, steps, nn.functional.mse_loss).item() for task in test) / len(test)

        before = score()
        train(wrapper, generator, iterations, tasks_per_batch, shots, steps, meta_lr)
        results[method] = {"before": before, "after": score()}
        print(f"{method:4s}  loss on new tasks {before:.2f} -> {results[method]['after']:.2f}")

    # --8<-- [start:posterior]
    x, y, x_query, _ = test[0]
    learner = wrapper.clone()
    for _ in range(steps):
        learner.adapt(nn.functional.mse_loss(learner(x), y))
    post = learner.posterior()  # N(mean, variance) over this task's weights
    outputs = post.predict(x_query, samples=10)  # (10, shots, 1): ten networks
    for name, layer in wrapper.diagnostics()["layers"].items():
        print(f"{name:10s}  P_0 {layer['prior_precision']:9.1f}   share of the data {layer['share']:.3f}")
    # --8<-- [end:posterior]
    results["outputs"] = outputs.detach()
    return results


if __name__ == "__main__":
    main()
