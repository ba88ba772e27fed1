#!/usr/bin/env python3

"""Swapping MAML for NIW in learn2learn's sine loop: line A, B or C is all that differs. Needs no data."""

import argparse

import torch
from torch import nn, optim
from tqdm import tqdm

from l2l_niw import NIW

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def sample_task(shots):
    """A sine wave of random amplitude and phase: `shots` points of support, and as many of query."""
    x = 10 * torch.rand(2 * shots, 1) - 5
    y = (0.1 + 4.9 * torch.rand(1)) * torch.sin(x + torch.pi * torch.rand(1))
    return x[:shots], y[:shots], x[shots:], y[shots:]


def main(method="niw", shots=10, tasks_per_batch=16, iterations=500, adapt_lr=0.01, meta_lr=0.003, steps=5, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    if method == "maml":
        maml = l2l.algorithms.MAML(model, lr=adapt_lr)  # line A
    elif method == "niw":
        maml = NIW(model, lr=adapt_lr)  # line B
    else:
        maml = NIW(model, lr=adapt_lr, rank=8)  # line C: tasks differ along 8 learned directions
    opt = optim.Adam(maml.parameters(), meta_lr)
    lossfn = nn.MSELoss(reduction="mean")

    losses = []
    bar = tqdm(range(iterations), desc=method)
    for _ in bar:
        opt.zero_grad()
        for _ in range(tasks_per_batch):
            learner = maml.clone()
            x_support, y_support, x_query, y_query = sample_task(shots)
            for _ in range(steps):
                learner.adapt(lossfn(learner(x_support), y_support))
            query_loss = lossfn(learner(x_query), y_query)
            query_loss.backward()
            losses.append(query_loss.item())
        for p in maml.parameters():
            p.grad.data.mul_(1.0 / tasks_per_batch)
        opt.step()
        recent = losses[-50 * tasks_per_batch :]
        bar.set_postfix(loss=f"{sum(recent) / len(recent):.3f}")
    print(f"{method}: query loss over the last {len(recent)} tasks {sum(recent) / len(recent):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=["maml", "niw", "rank"], default="niw", help="which line to run, A, B or C")
    parser.add_argument("--iterations", type=int, default=500, help="meta-batches of training")
    parser.add_argument("--seed", type=int, default=0, help="makes a run repeatable")
    main(**vars(parser.parse_args()))
