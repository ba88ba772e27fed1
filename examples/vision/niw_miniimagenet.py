#!/usr/bin/env python3

"""
NIW on mini-ImageNet: learn2learn's `examples/vision/maml_miniimagenet.py` with one constructor changed.

The loop, its names and its numbers are those of that script; the line that differs is marked. `--method maml` runs the
line as it was. Data are learn2learn's own, downloaded to --root if they are not there.
"""

import argparse
import random

import numpy as np
import torch
from torch import nn, optim

from l2l_niw import NIW

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def accuracy(predictions, targets):
    predictions = predictions.argmax(dim=1).view(targets.shape)
    return (predictions == targets).sum().float() / targets.size(0)


def fast_adapt(batch, learner, loss, adaptation_steps, shots, ways, device):
    data, labels = batch
    data, labels = data.to(device), labels.to(device)

    # of each class every second image is support, the others are query
    adaptation = torch.zeros(data.size(0), dtype=torch.bool)
    adaptation[torch.arange(shots * ways) * 2] = True
    adaptation_data, adaptation_labels = data[adaptation], labels[adaptation]
    evaluation_data, evaluation_labels = data[~adaptation], labels[~adaptation]

    for _ in range(adaptation_steps):
        learner.adapt(loss(learner(adaptation_data), adaptation_labels))

    predictions = learner(evaluation_data)
    return loss(predictions, evaluation_labels), accuracy(predictions, evaluation_labels)


def main(
    method="niw",
    ways=5,
    shots=5,
    meta_lr=0.003,
    fast_lr=0.5,
    meta_batch_size=32,
    adaptation_steps=1,
    num_iterations=60000,
    root="~/data",
    cuda=True,
    seed=42,
):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    device = torch.device("cuda" if cuda and torch.cuda.is_available() else "cpu")

    tasksets = l2l.vision.benchmarks.get_tasksets(
        "mini-imagenet",
        train_samples=2 * shots,
        train_ways=ways,
        test_samples=2 * shots,
        test_ways=ways,
        root=root,
    )

    model = l2l.vision.models.MiniImagenetCNN(ways)
    model.to(device)
    if method == "maml":
        maml = l2l.algorithms.MAML(model, lr=fast_lr, first_order=False)
    else:
        maml = NIW(model, lr=fast_lr, first_order=False)  # the line that differs
    opt = optim.Adam(maml.parameters(), meta_lr)
    loss = nn.CrossEntropyLoss(reduction="mean")

    for iteration in range(num_iterations):
        opt.zero_grad()
        totals = np.zeros(4)
        for _ in range(meta_batch_size):
            learner = maml.clone()
            error, acc = fast_adapt(tasksets.train.sample(), learner, loss, adaptation_steps, shots, ways, device)
            error.backward()
            totals[:2] += error.item(), acc.item()

            learner = maml.clone()
            error, acc = fast_adapt(tasksets.validation.sample(), learner, loss, adaptation_steps, shots, ways, device)
            totals[2:] += error.item(), acc.item()

        names = ("train error", "train accuracy", "validation error", "validation accuracy")
        print(f"iteration {iteration}:", ", ".join(f"{n} {v / meta_batch_size:.4f}" for n, v in zip(names, totals)))

        for p in maml.parameters():
            p.grad.data.mul_(1.0 / meta_batch_size)
        opt.step()

    totals = np.zeros(2)
    for _ in range(meta_batch_size):
        learner = maml.clone()
        error, acc = fast_adapt(tasksets.test.sample(), learner, loss, adaptation_steps, shots, ways, device)
        totals += error.item(), acc.item()
    print(f"test error {totals[0] / meta_batch_size:.4f}, test accuracy {totals[1] / meta_batch_size:.4f}")
    return totals[1] / meta_batch_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["niw", "maml"], default="niw", help="which of the two lines")
    parser.add_argument("--shots", type=int, default=5, help="support images of a class")
    parser.add_argument("--num-iterations", type=int, default=60000, help="batches of 32 tasks")
    parser.add_argument("--root", default="~/data", help="folder of the data")
    parser.add_argument("--seed", type=int, default=42, help="makes a run repeatable")
    main(**vars(parser.parse_args()))
