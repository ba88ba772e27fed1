#!/usr/bin/env python3

"""
Meta-gradients: how near NIW's come to MAML's, by second_order, and what they cost.

    python benchmarks/meta_gradients.py --data ROOT
    python benchmarks/meta_gradients.py --dataset cifarfs --ways 5 --batches 0 50 --data ROOT

Each gets the same tasks, the same weights and no noise, so that only the way back differs. The gradient of a
batch of tasks is compared with the one that learn2learn's MAML has: the cosine of the angle between them, and the ratio
of their lengths; first at the start of training, then after some batches of MAML's.
"""

import argparse
import time

import l2l_niw  # noqa: F401
import learn2learn as l2l
import torch
from torch import optim
from torch.nn import functional as F

from l2l_niw import NIW
from l2l_niw.vision import Config, build
from l2l_niw.vision.pretraining import load_start
from l2l_niw.vision.tasks import tasksets_of


def gradient(wrapper, tasks, steps):
    """Of a batch of tasks, flat, and the seconds that it took."""
    wrapper.zero_grad()
    began = time.perf_counter()
    for task in tasks:
        learner = wrapper.clone()
        for _ in range(steps):
            learner.adapt(F.cross_entropy(learner(task.x), task.y))
        (F.cross_entropy(learner(task.x_query), task.y_query) / len(tasks)).backward()
    seconds = time.perf_counter() - began
    return torch.cat([p.grad.flatten() for p in wrapper.module.parameters()]).clone(), seconds


def compare(model, tasks, lr, steps):
    """Lines of the table: name, cosine, ratio of lengths, seconds per task."""
    exact, seconds = gradient(l2l.algorithms.MAML(model, lr=lr), tasks, steps)
    lines = [("learn2learn's MAML", 1.0, 1.0, seconds / len(tasks))]
    for second_order in ("none", "last_layer", "all"):
        options = {"temperature": 0.0, "learn_step_sizes": False, "second_order": second_order}
        found, seconds = gradient(NIW(model, lr, **options), tasks, steps)
        cosine, ratio = F.cosine_similarity(found, exact, 0).item(), (found.norm() / exact.norm()).item()
        lines.append((f"NIW, second_order='{second_order}'", cosine, ratio, seconds / len(tasks)))
    return lines


def train(model, tasks, lr, steps, batches, size, first):
    maml, opt = l2l.algorithms.MAML(model, lr=lr), optim.Adam(model.parameters(), 0.003)
    for i in range(batches):
        gradient(maml, [tasks[first + i * size + j] for j in range(size)], steps)
        opt.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dataset", default="omniglot", help="omniglot, cifarfs, fc100, mini-imagenet, tiered-imagenet"
    )
    parser.add_argument("--ways", type=int, default=20, help="classes per task")
    parser.add_argument("--shots", type=int, default=1, help="support images per class")
    parser.add_argument("--steps", type=int, default=5, help="inner steps")
    parser.add_argument("--inner-lr", type=float, default=0.1, help="learning rate of the inner steps")
    parser.add_argument("--tasks", type=int, default=20, help="tasks of the gradient")
    parser.add_argument("--batches", type=int, nargs="+", default=[0, 50], help="after how many of MAML's, of 4 tasks")
    parser.add_argument("--pretraining", type=int, default=10, help="epochs of pretraining before that")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tasks")
    parser.add_argument("--data", help="folder of the data, or the variable L2L_NIW_DATA")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = ("dataset", "ways", "shots", "pretraining", "seed")
    config = Config(method="maml", train_queries=5, **{name: getattr(args, name) for name in names})
    tasks, method = tasksets_of(config, args.data).train, build(config)
    if config.pretraining:
        load_start(method.backbones[0], config, args.data)
    model, done = method.module.module, 0
    print("| after batches | gradient of | cosine with MAML's | length / MAML's | ms per task |\n|---|---|---|---|---|")
    for batches in sorted(args.batches):
        train(model, tasks, args.inner_lr, args.steps, batches - done, 4, args.tasks + 4 * done)
        done = batches
        for name, *numbers, seconds in compare(model, [tasks[i] for i in range(args.tasks)], args.inner_lr, args.steps):
            print(f"| {batches} | {name} | " + " | ".join(f"{x:.3f}" for x in numbers) + f" | {1000 * seconds:.0f} |")


if __name__ == "__main__":
    main()
