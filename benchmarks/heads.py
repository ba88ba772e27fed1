#!/usr/bin/env python3

"""
What a head adds to the time of a Conv-4 episode under NIW.

    python benchmarks/heads.py                       # 84x84, 5-way 1-shot, 15 queries a class, k = 5
    python benchmarks/heads.py --shots 5 --rounds 2

The other side of each ratio is the same episode with a head that does nothing but slice the features. Both take
turns within one process, a process a head; a ratio is the median over pairs of neighbouring episodes. The machine's own
unrest is as large as what is looked for: the row 'nothing' shows it, with that empty head on both sides, and the head
alone is timed too, its forwards and backwards of one episode, on features. Times are of the CPU.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from processes import command, in_turns, machine, publish

from l2l_niw import NIW, EpisodicModel
from l2l_niw.heads import ANP, CNP, FEAT, BayesianRidge, Head, Linear, MetaQDA, NearestCentroid, Ridge
from l2l_niw.predictions import Classes, Gaussian

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds

RESULTS = Path(__file__).parent / "results" / "heads.md"
FEATURES = 32
HEADS = {
    "nothing": lambda: Bare("classification"),
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


class Backbone(torch.nn.Module):
    """learn2learn's Conv-4 with its last maps averaged, as FEAT and MetaQDA use it."""

    def __init__(self):
        super().__init__()
        self.base = l2l.vision.models.ConvBase(hidden=FEATURES, channels=3, max_pool=True)

    def forward(self, x):
        return self.base(x).mean((2, 3))


class Episodes:
    """A model in training under NIW."""

    def __init__(self, head, shots, queries, steps):
        torch.manual_seed(0)
        self.niw, self.steps = NIW(EpisodicModel(Backbone(), head), lr=0.01), steps
        self.opt = torch.optim.Adam(self.niw.parameters(), 1e-3)
        y = torch.arange(5)
        self.x, self.x_query = torch.randn(5 * shots, 3, 84, 84), torch.randn(5 * queries, 3, 84, 84)
        self.y, self.y_query = y.repeat(shots), y.repeat(queries)
        if head.task == "regression":
            self.y, self.y_query = torch.randn(5 * shots, 1), torch.randn(5 * queries, 1)

    def seconds(self):
        began = time.process_time()
        self.opt.zero_grad()
        learner = self.niw.clone()
        for _ in range(self.steps):
            learner.adapt(learner(self.x, self.y).nll(self.y))
        learner(self.x, self.y, self.x_query, self.y_query).loss(self.y_query).backward()
        self.opt.step()
        return time.process_time() - began

    def head_seconds(self):
        """The head's own part of an episode, on features that ask for gradients."""
        model = self.niw.module
        with torch.no_grad():
            features, features_query = model.features(self.x), model.features(self.x_query)
        features.requires_grad_()
        features_query.requires_grad_()
        began = time.process_time()
        for _ in range(self.steps):
            model.head(features, self.y).nll(self.y).backward()
        model.head(features, self.y, features_query, self.y_query).loss(self.y_query).backward()
        return time.process_time() - began


def measure(name, shots, queries, steps, episodes):
    head = HEADS[name]()
    sides = {"with": Episodes(head, shots, queries, steps), "bare": Episodes(Bare(head.task), shots, queries, steps)}
    seconds = {side: [] for side in sides}
    for turn in range(episodes + 1):
        for side in sorted(sides, reverse=turn % 2):  # neither always has the machine as the other left it
            seconds[side].append(sides[side].seconds())
    ratios = [a / b for a, b in zip(seconds["with"][1:], seconds["bare"][1:])]
    seconds["head"] = [sides["with"].head_seconds() for _ in range(4 * episodes + 1)]
    medians = {side: statistics.median(values[1:]) for side, values in seconds.items()}
    return {**medians, "ratios": ratios, "parameters": sum(p.numel() for p in head.parameters())}


def table(results, args):
    rows = [
        "| head | parameters | ms with it | ms without | ratio (middle half of the pairs) | head alone, ms | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rounds in results.items():
        low, middle, high = statistics.quantiles([ratio for r in rounds for ratio in r["ratios"]], n=4)
        ms = {side: 1000 * statistics.median(r[side] for r in rounds) for side in ("with", "bare", "head")}
        rows.append(
            f"| {name} | {rounds[0]['parameters']:,} | {ms['with']:.0f} | {ms['bare']:.0f} "
            f"| {middle:.3f} ({low:.3f} to {high:.3f}) "
            f"| {ms['head']:.1f} | {100 * ms['head'] / ms['bare']:.1f}% |"
        )
    body = "\n".join(rows)
    setting = (
        f"Conv-4 with {FEATURES} filters on 84x84, 5-way {args.shots}-shot, {args.queries} queries a class, NIW with "
        f"k = {args.steps}, {args.threads} thread(s), {args.rounds} rounds of {args.episodes} episodes of either side, "
        f"which take turns in one process a head. {machine()}."
    )
    return f"# What a head adds to an episode\n\n{body}\n\n{setting}\n\n{command()}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=1, help="support images a class")
    parser.add_argument("--queries", type=int, default=15, help="query images a class")
    parser.add_argument("--steps", type=int, default=5, help="inner steps, k")
    parser.add_argument("--episodes", type=int, default=8, help="timed episodes of either side, after one to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="how often each head has its turn")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table is written")
    parser.add_argument("--measure", choices=list(HEADS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = {name: getattr(args, name) for name in ("shots", "queries", "steps", "episodes")}
    if args.measure:
        print(json.dumps(measure(args.measure, **options)))
        return
    publish(table(in_turns(__file__, HEADS, args.rounds, args.threads, **options), args), args.results)


if __name__ == "__main__":
    main()
