"""One loop for every head: plain training, MAML and NIW on the same tasks, and a printed comparison."""

import argparse
import copy
import itertools
import time

import torch
from tqdm import trange

from l2l_niw import NIW

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def wrap(method, model, lr, **niw_options):
    if method == "MAML":
        return l2l.algorithms.MAML(model, lr)
    return NIW(model, lr, second_order="none", **niw_options) if method == "NIW" else model


def adapted(method, wrapped, task, steps):
    """What predicts a task's query: the model itself, or a clone after its inner steps."""
    x, y, _, _ = task
    if method == "plain":
        return wrapped
    learner = wrapped.clone()
    for _ in range(steps):
        learner.adapt(learner(x, y).nll(y))
    return learner


def stream(sample_task, seed):
    """The same tasks for every method, whatever randomness it draws itself."""
    for number in itertools.count():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1_000_000 * seed + number)
            task = sample_task()
        yield task


def train(method, wrapped, tasks, iterations, tasks_per_batch, steps, meta_lr):
    opt = torch.optim.Adam(wrapped.parameters(), meta_lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, iterations)
    bar = trange(iterations, desc=f"{method:5s}", leave=False)
    for _ in bar:
        opt.zero_grad()
        total = 0.0
        for _ in range(tasks_per_batch):
            x, y, x_query, y_query = task = next(tasks)
            learner = adapted(method, wrapped, task, steps)
            loss = learner(x, y, x_query, y_query).loss(y_query)
            loss.backward()
            total += loss.item()
        for p in wrapped.parameters():
            p.grad.data.mul_(1.0 / tasks_per_batch)
        opt.step()
        schedule.step()
        bar.set_postfix(loss=f"{total / tasks_per_batch:.3f}")


def test(method, wrapped, tasks, steps, samples):
    """Per task: the query's negative log-likelihood, and its accuracy or mean squared error."""
    scores = []
    for task in tasks:
        x, y, x_query, y_query = task
        learner = adapted(method, wrapped, task, steps)
        with torch.no_grad():
            if method == "NIW":
                prediction = learner.posterior().predict(x, y, x_query, samples=samples)
            else:
                prediction = learner(x, y, x_query)
            if y.is_floating_point():
                score = (prediction.mean - y_query).square().mean()
            else:
                score = (prediction.mode == y_query).float().mean()
            scores.append(torch.stack([prediction.nll(y_query), score]))
    return torch.stack(scores)


def compare(
    model, sample_task, lr, methods=("plain", "MAML", "NIW"), iterations=1000, tasks_per_batch=4, steps=3,
    meta_lr=0.003, test_tasks=500, samples=10, seed=0, **niw_options,
):  # fmt: skip
    """Trains copies of the model by each method, tests them on the same tasks, prints and returns the table."""
    results = {}
    print(f"{'':8s}{'NLL':>16s}{'accuracy or MSE':>22s}{'training':>12s}")
    for method in methods:
        torch.manual_seed(seed)
        wrapped = wrap(method, copy.deepcopy(model), lr, **niw_options)
        began = time.perf_counter()
        train(method, wrapped, stream(sample_task, seed), iterations, tasks_per_batch, steps, meta_lr)
        seconds = time.perf_counter() - began
        scores = test(method, wrapped, itertools.islice(stream(sample_task, seed + 1000), test_tasks), steps, samples)
        mean, error = scores.mean(0), scores.std(0) / test_tasks**0.5
        print(f"{method:8s}{mean[0]:9.3f} ± {error[0]:.3f}{mean[1]:15.3f} ± {error[1]:.3f}{seconds:10.0f} s")
        results[method] = {"nll": mean[0].item(), "score": mean[1].item(), "seconds": seconds}
    return results


def arguments(main, description):
    """Runs an example's main with --iterations and --seed from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--iterations", type=int, default=1000, help="batches of tasks in training")
    parser.add_argument("--seed", type=int, default=0, help="makes a run repeatable")
    main(**vars(parser.parse_args()))
