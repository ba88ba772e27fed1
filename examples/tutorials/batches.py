#!/usr/bin/env python3

"""Batches of episodes: Sine-Line with `BatchedEpisodes`, and the loop's gradient for comparison. No download."""

import time

import torch
from torch.nn import functional as F

from l2l_niw import NIW, BatchedEpisodes
from l2l_niw.data import SineLine
from l2l_niw.models import MLP


def support_loss(network, x, y):
    """The mean loss of one episode; `network(x)` is that episode's own network."""
    return F.mse_loss(network(x), y)


def loop(niw, tasks, steps):
    """The same as one call of `BatchedEpisodes`, episode by episode."""
    total = 0.0
    for x, y, x_query, y_query in zip(*tasks):
        learner = niw.clone()
        for _ in range(steps):
            learner.adapt(support_loss(learner, x, y))
        loss = support_loss(learner, x_query, y_query) / len(tasks.x)
        loss.backward()
        total += loss.item()
    return total


def gradient(niw, call):
    """What a call adds to the gradients, as one vector, and its time."""
    niw.zero_grad()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return torch.cat([p.grad.flatten() for p in niw.module.parameters()]), seconds


def main(iterations=150, tasks_per_batch=20, steps=5, lr=0.01, meta_lr=0.003, seed=0):
    torch.manual_seed(seed)
    family = SineLine()
    niw = NIW(MLP(1, (40, 40, 1)), lr=lr)
    episodes = BatchedEpisodes(niw, support_loss, steps=steps)
    opt = torch.optim.Adam(niw.parameters(), meta_lr)
    losses = []
    for _ in range(iterations):
        tasks = family.sample(tasks_per_batch)
        opt.zero_grad()
        loss = episodes(tasks.support, tasks.query)
        loss.backward()  # the mean over episodes: nothing to divide
        opt.step()
        losses.append(loss.item())
    tenth = max(iterations // 10, 1)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"query loss {first:.2f} -> {last:.2f}")

    # a batch of posteriors, and the networks drawn from them
    post = episodes.posterior(tasks.support)
    outputs = post.predict(tasks.x_query, samples=10)  # (10, tasks, queries, 1)

    # the loop's numbers: at temperature 0, where chains have no noise, both gradients agree
    still = NIW(niw.module, lr=lr, temperature=0.0)
    at_once = BatchedEpisodes(still, support_loss, steps=steps)
    at_once(tasks.support, tasks.query)  # warm up
    batched, fast = gradient(still, lambda: at_once(tasks.support, tasks.query).backward())
    looped, slow = gradient(still, lambda: loop(still, tasks, steps))
    difference = ((batched - looped).norm() / looped.norm()).item()
    print(f"{tasks_per_batch} episodes: loop {1000 * slow:.0f} ms, at once {1000 * fast:.0f} ms, ", end="")
    print(f"relative difference of their gradients {difference:.1e}")
    return {"first": first, "last": last, "outputs": outputs.detach(), "difference": difference}


if __name__ == "__main__":
    main()
