#!/usr/bin/env python3

"""
What an episode costs, by method, network and number of inner steps: the paper's Fig. 2 and Table 8.

    python benchmarks/complexity.py                          # everything on one thread; an hour and a half
    python benchmarks/complexity.py --threads 2              # the same on two
    python benchmarks/complexity.py --networks sine-line conv-4 --rounds 2
    python benchmarks/complexity.py --report                 # tables and plots of what has been measured

Every cell is measured in a process of its own; cells take turns, round by round, so that a busy moment of the machine
falls on all of them. Results are written as they come, and a stopped run resumes. The tables show medians
over rounds with their range, and ratios to ProtoNet and to 1-step MAML of the same run.

Time and memory are measured apart: for memory the C library is told to give free blocks back at once
(MALLOC_MMAP_THRESHOLD_), since else the peak is of what it keeps for later, and tells little of what a method holds.
"""

import argparse
import json
from pathlib import Path

import torch
from complexity_cells import (
    METHODS, NETWORKS, measure_calls, measure_memory, measure_prediction, measure_time, methods_of,
)  # fmt: skip
from complexity_report import report
from processes import in_own_process
from tqdm import tqdm

RESULTS = Path(__file__).parent / "results" / "complexity"
KINDS = {
    "time": measure_time,
    "memory": measure_memory,
    "predict": measure_prediction,
    "calls": measure_calls,
}


def measure(cell, seconds):
    """What this process is for: a cell is 'kind/argument/...'."""
    kind, *arguments = cell.split("/")
    return KINDS[kind](*arguments, seconds)


def cells(args):
    """What is to be measured, each with the number of rounds that it takes part in."""
    for network in args.networks:
        for method in methods_of(network, args.methods):
            yield f"memory/{network}/{method}", 1
            if not method.endswith("-50"):  # batches of large networks take minutes, and gain nothing
                large = method.startswith("niw-batch") and network.startswith(("resnet-18", "vit-small"))
                yield f"time/{network}/{method}", 1 if large else args.rounds
    for network in ("sine-line", "omniglot"):
        yield f"predict/{network}", args.rounds
    yield "calls/sine-line", 1


def done_so_far(path):
    """{(cell, round)} of a file with one measurement per line."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(found["cell"], found["round"]) for found in map(json.loads, lines)}


def run(args):
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{args.threads}-threads.jsonl"
    done, wanted = done_so_far(path), [c for c in cells(args) if c[0].split("/")[0] in args.kinds]
    turns = [(cell, r) for r in range(args.rounds) for cell, rounds in wanted if r < rounds]
    for cell, r in tqdm([turn for turn in turns if turn not in done], desc="measurements"):
        variables = {"MALLOC_MMAP_THRESHOLD_": "65536"} if cell.startswith("memory") else None
        found = in_own_process(__file__, args.threads, variables, measure=cell, seconds=args.seconds)
        with path.open("a") as file:
            file.write(json.dumps({"cell": cell, "round": r, **found}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), help="which networks")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="which methods")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="what is measured")
    parser.add_argument("--rounds", type=int, default=3, help="how often each cell has its turn")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a cell is measured, once warm")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--report", action="store_true", help="only write tables and plots of what has been measured")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure:
        print(json.dumps(measure(args.measure, args.seconds)))
        return
    if not args.report:
        run(args)
    report(args.results)


if __name__ == "__main__":
    main()
