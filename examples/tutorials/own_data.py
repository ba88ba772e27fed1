#!/usr/bin/env python3

"""Your own data: a labelled tensor as few-shot tasks, by learn2learn's transforms or from memory. No download."""

import random

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from l2l_niw import NIW
from l2l_niw.data import Images, ImageTaskset
from l2l_niw.models import MLP

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds
from learn2learn.data.transforms import FusedNWaysKShots, LoadData, RemapLabels


def make_data(classes=30, per_class=20, size=6):
    """A stand-in for yours: small noisy images, (n, 1, size, size) in bytes, and their classes."""
    centers = torch.randint(40, 216, (classes, 1, size, size))
    images = centers.repeat_interleave(per_class, 0) + 40 * torch.randn(classes * per_class, 1, size, size)
    return images.clamp(0, 255).byte(), torch.arange(classes).repeat_interleave(per_class)


def split(images, labels, classes):
    """The images of some classes, numbered from 0: no class may be in two splits."""
    where = torch.isin(labels, torch.tensor(classes))
    return images[where], torch.unique(labels[where], return_inverse=True)[1]


def learn2learn_tasks(images, labels, ways, shots, queries):
    """The way of learn2learn: any Dataset that gives (x, label)."""
    data = l2l.data.MetaDataset(TensorDataset(images.float() / 255, labels))
    transforms = [FusedNWaysKShots(data, n=ways, k=shots + queries), LoadData(data), RemapLabels(data)]
    tasks = l2l.data.Taskset(data, transforms)

    def sample():
        x, y = tasks.sample()
        order = torch.argsort(y, stable=True)  # class by class
        support = torch.arange(len(y)) % (shots + queries) < shots
        x, y = x[order], y[order]
        return x[support], y[support], x[~support], y[~support]

    return sample


def main(iterations=60, tasks_per_batch=4, test_tasks=40, ways=5, shots=2, queries=5, steps=5, lr=0.1, seed=0):
    torch.manual_seed(seed)
    random.seed(seed)  # learn2learn's transforms draw from it
    np.random.seed(seed)
    images, labels = make_data()
    train, test = split(images, labels, range(20)), split(images, labels, range(20, 30))
    sample = learn2learn_tasks(*train, ways, shots, queries)
    taskset = ImageTaskset(Images(*test), ways, shots, queries, num_tasks=test_tasks)  # seeded: task i is always task i

    model = torch.nn.Sequential(torch.nn.Flatten(), MLP(36, (64, ways)))
    niw = NIW(model, lr=lr)
    opt = torch.optim.Adam(niw.parameters(), 0.003)
    for _ in range(iterations):
        opt.zero_grad()
        for _ in range(tasks_per_batch):
            x, y, x_query, y_query = sample()
            learner = niw.clone()
            for _ in range(steps):
                learner.adapt(F.cross_entropy(learner(x), y))
            F.cross_entropy(learner.query(x_query), y_query).backward()
        for p in niw.parameters():
            p.grad.data.mul_(1.0 / tasks_per_batch)
        opt.step()

    correct = []
    for i in range(test_tasks):
        x, y, x_query, y_query = taskset[i]
        learner = niw.clone()
        for _ in range(steps):
            learner.adapt(F.cross_entropy(learner(x), y))
        probabilities = learner.posterior().predict(x_query, samples=10).softmax(-1).mean(0)
        correct.append((probabilities.argmax(-1) == y_query).float().mean().item())
    accuracy = sum(correct) / test_tasks
    print(f"accuracy on {test_tasks} tasks of new classes {100 * accuracy:.1f}%")
    return {"accuracy": accuracy, "taskset": taskset, "sample": sample}


if __name__ == "__main__":
    main()
