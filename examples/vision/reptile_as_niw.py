#!/usr/bin/env python3

"""
Reptile as a setting of NIW: with a posterior that is a spike and the query's loss dropped, what is left of NIW's
objective is |m_i - m_0|^2 / 2, and a step of SGD on it is Reptile's m_0 <- m_0 + epsilon (m_i - m_0).

Runs Reptile as its authors wrote it beside NIW on the same tasks, and prints how far apart their weights are.
"""

import argparse
import copy

import torch
from torch import nn, optim
from tqdm import tqdm

from l2l_niw.data import get_tasksets
from l2l_niw.models import batch_statistics
from l2l_niw.algorithms.special_cases import reptile, reptile_objective

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def main(ways=5, shots=5, iterations=300, fast_lr=0.1, epsilon=0.5, steps=5, filters=32, data=None, seed=0):
    torch.manual_seed(seed)
    tasks = get_tasksets("omniglot", ways, shots, queries=1, root=data, seed=seed).train
    model = batch_statistics(l2l.vision.models.OmniglotCNN(ways, hidden_size=filters))
    niw = reptile(copy.deepcopy(model), lr=fast_lr)
    opt = optim.SGD(niw.module.parameters(), lr=epsilon)
    loss = nn.CrossEntropyLoss()

    bar = tqdm(range(iterations))
    for _ in bar:
        task = tasks.sample()

        own = copy.deepcopy(model)  # Reptile, by hand
        inner = optim.SGD(own.parameters(), lr=fast_lr)
        for _ in range(steps):
            inner.zero_grad()
            error = loss(own(task.x), task.y)
            error.backward()
            inner.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), own.parameters()):
                p.add_(epsilon * (q - p))

        opt.zero_grad()  # Reptile, as NIW
        learner = niw.clone()
        for _ in range(steps):
            learner.adapt(loss(learner(task.x), task.y))
        reptile_objective(learner).backward()
        opt.step()
        bar.set_postfix(loss=f"{error.item():.3f}")

    pairs = list(zip(model.parameters(), niw.module.parameters()))
    apart = max((p - q).abs().max().item() for p, q in pairs)
    largest = max(p.abs().max().item() for p, _ in pairs)
    print(f"After {iterations} tasks the weights differ by {apart:.2e} at most; the largest is {largest:.2f}.")
    return apart


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=300, help="tasks (default: 300)")
    parser.add_argument("--data", help="folder of the data, or the variable L2L_NIW_DATA")
    parser.add_argument("--seed", type=int, default=0, help="makes a run repeatable (default: 0)")
    main(**vars(parser.parse_args()))
