#!/usr/bin/env python3

"""
What a head adds to the time of a Conv-4 episode under NIW.

    python benchmarks/heads.py                       # 84x84, 5-way 1-shot, 15 queries per class, k = 5
    python benchmarks/heads.py --shots 5 --rounds 2

Two whole episodes differ by more from one moment to the next than by their heads, so the head's part is measured by
itself: the same training episode on ready features, chain, posterior and KL of the head's weights included, against
that with a head which does nothing but slice them. Its share is of the Conv-4 episode without a head. Each head has a
process of its own, and the two sides take turns in it.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from processes import command, in_turns, publish
from torch import nn

from l2l_niw import NIW, EpisodicModel
from l2l_niw.heads import ANP, CNP, FEAT, BayesianRidge, Head, Linear, MetaQDA, NearestCentroid, Ridge
from l2l_niw.heads.predictions import Classes, Gaussian
from l2l_niw.utils._process import machine

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds

RESULTS = Path(__file__).parent / "results" / "heads.md"
FEATURES = 32
HEADS = {
    "linear": lambda: Linear(FEATURES, 5),
    "nearest centroid": lambda: NearestCentroid(),
    "nearest centroid, cosine": lambda: NearestCentroid("cosine", scale=10.0, learn_scale=True),
    "ridge": lambda: Ridge(learn_lam=True),
    "FEAT": lambda: FEAT(FEATURES),
    "MetaQDA, MAP": lambda: MetaQDA(FEATURES, "map"),
    "MetaQDA, Bayesian": lambda: MetaQDA(FEATURES),
    "ridge, regression": lambda: Ridge("regression", learn_lam=True),
    "Bayesian ridge": lambda: BayesianRidge(),
    "CNP": lambda: CNP(FEATURES, width=64),
    "CNP+BA": lambda: CNP(FEATURES, width=64, aggregate="bayesian"),
    "ANP, deterministic and latent": lambda: ANP(FEATURES, width=64),
}


class Bare(Head):
    """No head at all: the first features are the outputs."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def predict(self, support, y, query, query_y):
        outputs = query + support.mean(-2, keepdim=True)
        if self.task == "regression":
            return Gaussian(outputs[..., :1], torch.ones(()))
        return Classes(outputs[..., : y.ways], y)


class Backbone(nn.Module):
    """learn2learn's Conv-4 with its last maps averaged, as FEAT and MetaQDA use it."""

    def __init__(self):
        super().__init__()
        self.base = l2l.vision.models.ConvBase(hidden=FEATURES, channels=3, max_pool=True)

    def forward(self, x):
        return self.base(x).mean((2, 3))


class Ready(nn.Module):
    """Features that need no backbone, but a weight for NIW to adapt."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.weight * x


class Training:
    """A model in training under NIW, on one episode of inputs of a shape."""

    def __init__(self, backbone, head, shape, args):
        torch.manual_seed(0)
        self.niw, self.steps = NIW(EpisodicModel(backbone, head), lr=0.01, second_order="none"), args.steps
        self.opt = torch.optim.Adam(self.niw.parameters(), 1e-3)
        n, m, y = 5 * args.shots, 5 * args.queries, torch.arange(5)
        self.x, self.x_query = torch.randn(n, *shape), torch.randn(m, *shape)
        self.y, self.y_query = y.repeat(args.shots), y.repeat(args.queries)
        if head.task == "regression":
            self.y, self.y_query = torch.randn(n, 1), torch.randn(m, 1)

    def seconds(self):
        began = time.perf_counter()
        self.opt.zero_grad()
        learner = self.niw.clone()
        for _ in range(self.steps):
            learner.adapt(learner(self.x, self.y).nll(self.y))
        learner(self.x, self.y, self.x_query, self.y_query).loss(self.y_query).backward()
        self.opt.step()
        return time.perf_counter() - began


def measure(name, args):
    """Medians: a Conv-4 episode without a head, and an episode on ready features with the head and without."""
    head = HEADS[name]()
    conv = Training(Backbone(), Bare(head.task), (3, 84, 84), args)
    sides = {
        "with": Training(Ready(), head, (FEATURES,), args),
        "without": Training(Ready(), Bare(head.task), (FEATURES,), args),
    }
    seconds = {"conv": [conv.seconds() for _ in range(args.episodes + 1)], "with": [], "without": []}
    for _ in range(20 * args.episodes + 1):
        for side, training in sides.items():
            seconds[side].append(training.seconds())
    medians = {side: statistics.median(values[1:]) for side, values in seconds.items()}
    return {**medians, "parameters": sum(p.numel() for p in head.parameters())}


def table(results, args):
    rows = [
        "| head | parameters | Conv-4 episode without it, ms | added, ms (range over rounds) | share |",
        "|---|---|---|---|---|",
    ]
    for name, rounds in results.items():
        added = sorted(1000 * (r["with"] - r["without"]) for r in rounds)
        conv = 1000 * statistics.median(r["conv"] for r in rounds)
        middle = statistics.median(added)
        rows.append(
            f"| {name} | {rounds[0]['parameters']:,} | {conv:.0f} "
            f"| {middle:.1f} ({added[0]:.1f} to {added[-1]:.1f}) | {100 * middle / conv:.1f}% |"
        )
    body = "\n".join(rows)
    setting = (
        f"Conv-4 with {FEATURES} filters on 84x84, 5-way {args.shots}-shot, {args.queries} queries per class, NIW with "
        f"k = {args.steps}, {args.threads} thread(s), {args.rounds} rounds, each head in its own process. {machine()}."
    )
    return f"# What a head adds to an episode\n\n{body}\n\n{setting}\n\n{command()}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=1, help="support images per class")
    parser.add_argument("--queries", type=int, default=15, help="query images per class")
    parser.add_argument("--steps", type=int, default=5, help="inner steps, k")
    parser.add_argument("--episodes", type=int, default=5, help="timed Conv-4 episodes; 20 times as many on features")
    parser.add_argument("--rounds", type=int, default=3, help="how often each head has its turn")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table is written")
    parser.add_argument("--measure", choices=list(HEADS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = {name: getattr(args, name) for name in ("shots", "queries", "steps", "episodes")}
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    publish(table(in_turns(__file__, HEADS, args.rounds, args.threads, **options), args), args.results)


if __name__ == "__main__":
    main()
