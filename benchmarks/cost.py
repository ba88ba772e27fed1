#!/usr/bin/env python3

"""
What an episode costs: time and peak memory of learn2learn's MAML loop, by method.

    python benchmarks/cost.py                        # Conv-4, 84x84, 5-way 1-shot, 15 queries a class, k = 5
    python benchmarks/cost.py --steps 1 --rounds 3

Every measurement runs in a process of its own. Methods take turns, round by round, so that a busy moment of
the machine falls on all of them; the table shows medians over rounds and their ratios to first-order MAML.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from processes import command, in_turns, machine, peak_memory, publish
from torch import nn

from l2l_niw import NIW

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds

RESULTS = Path(__file__).parent / "results" / "cost.md"
METHODS = {
    "FO-MAML": lambda model: l2l.algorithms.MAML(model, lr=0.1, first_order=True),
    "MAML": lambda model: l2l.algorithms.MAML(model, lr=0.1),
    "NIW": lambda model: NIW(model, lr=0.1),
    "NIW, ggn": lambda model: NIW(model, lr=0.1, curvature="ggn"),
}


def measure(method, steps, episodes, filters, queries):
    """Median seconds of a training episode, and the process's peak memory in MB with and without imports."""
    before = peak_memory()
    torch.manual_seed(0)
    model = l2l.vision.models.MiniImagenetCNN(5, hidden_size=filters)
    wrapper = METHODS[method](model)
    opt = torch.optim.Adam(wrapper.parameters(), 1e-3)
    loss = nn.CrossEntropyLoss()
    x, y = torch.randn(5, 3, 84, 84), torch.arange(5)
    x_query, y_query = torch.randn(5 * queries, 3, 84, 84), torch.arange(5).repeat_interleave(queries)
    seconds = []
    for _ in range(episodes + 2):
        began = time.perf_counter()
        opt.zero_grad()
        learner = wrapper.clone()
        for _ in range(steps):
            learner.adapt(loss(learner(x), y))
        loss(learner(x_query), y_query).backward()
        opt.step()
        del learner
        seconds.append(time.perf_counter() - began)
    peak = peak_memory()
    return {"seconds": statistics.median(seconds[2:]), "peak": peak, "own": peak - before}


def table(results, args):
    """Markdown from {method: [measurement of each round]}."""
    medians = {m: {k: statistics.median(r[k] for r in rounds) for k in rounds[0]} for m, rounds in results.items()}
    base = medians["FO-MAML"]
    rows = [
        "| method | ms an episode (range) | ratio | peak memory, MB | ratio | without imports, MB | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, m in medians.items():
        times = [1000 * r["seconds"] for r in results[method]]
        rows.append(
            f"| {method} | {1000 * m['seconds']:.1f} ({min(times):.1f} to {max(times):.1f}) "
            f"| {m['seconds'] / base['seconds']:.2f} | {m['peak']:.0f} | {m['peak'] / base['peak']:.2f} "
            f"| {m['own']:.0f} | {m['own'] / base['own']:.2f} |"
        )
    setting = (
        f"Conv-4, {args.filters} filters, 84x84, 5-way 1-shot, {args.queries} queries a class, k = {args.steps}; "
        f"{args.threads} thread(s), {args.rounds} rounds of {args.episodes} episodes, each in its own process. "
        f"{machine()}. "
        "Ratios are to FO-MAML in the same run."
    )
    body = "\n".join(rows)
    return f"# The cost of an episode\n\n{body}\n\n{setting}\n\n{command()}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="inner steps, k")
    parser.add_argument("--episodes", type=int, default=10, help="timed episodes a process, after two to warm up")
    parser.add_argument("--rounds", type=int, default=5, help="how often each method has its turn")
    parser.add_argument("--filters", type=int, default=32, help="filters of the Conv-4")
    parser.add_argument("--queries", type=int, default=15, help="query images a class")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table is written")
    parser.add_argument("--measure", choices=list(METHODS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure:
        print(json.dumps(measure(args.measure, args.steps, args.episodes, args.filters, args.queries)))
        return
    options = {name: getattr(args, name) for name in ("steps", "episodes", "filters", "queries")}
    publish(table(in_turns(__file__, METHODS, args.rounds, args.threads, **options), args), args.results)


if __name__ == "__main__":
    main()
