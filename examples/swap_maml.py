#!/usr/bin/env python3

"""
Swapping MAML for NIW, in a sine regression that needs no data.

The loop is the one of learn2learn's `examples/maml_sine.py`. Line A or line B is all that differs.

    python examples/swap_maml.py --method maml
    python examples/swap_maml.py --method niw
"""

import argparse

import torch
from torch import nn, optim
from tqdm import tqdm

from l2l_niw import NIW

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def sample_task(shots):
    """A sine wave of random amplitude and phase: `shots` points of support, and as many of query."""
    amplitude, phase = 0.1 + 4.9 * torch.rand(1), torch.pi * torch.rand(1)
    x = 10 * torch.rand(2 * shots, 1) - 5
    y = amplitude * torch.sin(x + phase)
    return x[:shots], y[:shots], x[shots:], y[shots:]


def main(method="niw", shots=10, tasks_per_batch=16, iterations=500, adapt_lr=0.01, meta_lr=0.003, adapt_steps=5,
         hidden_dim=32, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(1, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 1)
    )
    if method == "maml":
        maml = l2l.algorithms.MAML(model, lr=adapt_lr)  # line A
    else:
        maml = NIW(model, lr=adapt_lr)  # line B
    opt = optim.Adam(maml.parameters(), meta_lr)
    lossfn = nn.MSELoss(reduction="mean")

    recent = []
    bar = tqdm(range(iterations), desc=method)
    for _ in bar:
        opt.zero_grad()
        for _ in range(tasks_per_batch):
            learner = maml.clone()
            x_support, y_support, x_query, y_query = sample_task(shots)
            for _ in range(adapt_steps):
                learner.adapt(lossfn(learner(x_support), y_support))
            query_loss = lossfn(learner(x_query), y_query)
            query_loss.backward()
            recent.append(query_loss.item())
        for p in maml.parameters():
            p.grad.data.mul_(1.0 / tasks_per_batch)
        opt.step()
        recent = recent[-50 * tasks_per_batch :]
        bar.set_postfix(loss=f"{sum(recent) / len(recent):.3f}")
    print(f"{method}: query loss over the last {len(recent)} tasks {sum(recent) / len(recent):.3f}")

    if method == "niw":
        x_support, y_support, x_query, y_query = sample_task(shots)
        learner = maml.clone()
        for _ in range(adapt_steps):
            learner.adapt(lossfn(learner(x_support), y_support))
        with torch.no_grad():
            outputs = learner.posterior().predict(x_query, samples=50)
        print(f"a new task: rmse {(outputs.mean(0) - y_query).square().mean().sqrt():.3f}, "
              f"posterior standard deviation {outputs.std(0).mean():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["maml", "niw"], default="niw", help="which line to run, A or B")
    parser.add_argument("--iterations", type=int, default=500, help="meta-batches of training")
    parser.add_argument("--seed", type=int, default=0, help="makes a run repeatable")
    args = parser.parse_args()
    main(method=args.method, iterations=args.iterations, seed=args.seed)
