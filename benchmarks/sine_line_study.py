#!/usr/bin/env python3

"""
What the number of Langevin steps, the burn-in, the posterior samples and n_0 do: Sine-Line, NIW with a Bayesian ridge
head, one of them changed at a time.

    python benchmarks/sine_line_study.py                 # half an hour on one core
    python benchmarks/sine_line_study.py --report        # the plot of what has been run

Scores are of validation tasks. A stopped run resumes where it was.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from regression.niw import NIWMethod
from regression.rows import GGN
from regression.scoring import score, summary, tasks_of
from regression.training import TASKS, start_again, train

from l2l_niw.errors import NIWError
from l2l_niw.reports._packed import REMEDY, check_keys, check_numbers, read_lines
from l2l_niw.reports._pages import page
from l2l_niw.utils._process import machine

RESULTS = Path(__file__).parent / "results" / "sine_line_study"
BASE = {"steps": 5, "burn_in": 4, "samples": 10, "n0": None}
SAMPLES = [1, 2, 5, 10, 30]  # of the posterior, per prediction; the network is trained once
VALUES = {
    "steps": [1, 2, 3, 5, 8],  # with a burn-in of all but the last
    "burn_in": [0, 2, 3, 4],
    "n0": [1.0, 100.0, 10_000.0],
    "samples": SAMPLES,
    "samples_ggn": SAMPLES,
}
TITLES = {
    "steps": "Langevin steps",
    "burn_in": "burn-in, of 5 steps",
    "n0": "n_0 at first",
    "samples": "posterior samples",
    "samples_ggn": "posterior samples, ggn",
}


def settings(name, value):
    if name == "steps":
        return {**BASE, "steps": value, "burn_in": value - 1}
    return {**BASE, **GGN, "samples": value} if name == "samples_ggn" else {**BASE, name: value}


def trainings():
    """Every setting that has to be trained: not one for each number of posterior samples."""
    found = [settings(name, value) for name in ("steps", "burn_in", "n0") for value in VALUES[name]]
    return [s for i, s in enumerate(found) if s not in found[:i]] + [settings("samples_ggn", BASE["samples"])]


def run(chosen, seed, budget, test_tasks, built):
    torch.manual_seed(seed)
    fresh = NIWMethod("bayesian-ridge", lr=0.003, **chosen)
    method = start_again(built.setdefault("method", fresh), fresh)
    about = {"seed": seed, "budget": budget}
    try:
        _, seconds = train(method, 0.004, budget, seed, title=f"{chosen}, seed {seed}")
    except (RuntimeError, NIWError) as error:  # a setting under which chains diverge is a finding too
        yield {"settings": chosen, **about, "error": str(error).splitlines()[0]}
        return
    tasks = tasks_of("validation", test_tasks)
    for samples in SAMPLES if chosen in (BASE, {**BASE, **GGN}) else [chosen["samples"]]:
        method.samples = samples
        found = summary(*score(method.predict, tasks))
        del found["reliability"]
        yield {"settings": {**chosen, "samples": samples}, **about, "seconds": seconds, **found}


def line(found, failed):
    """A row of the table: its runs that came to an end, and how many did not."""
    if not found:
        return f"{failed} diverged | | |"
    shown = []
    for metric in ("mse", "nll"):
        numbers = [f[metric] for f in found]
        shown.append(f"{sum(numbers) / len(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})")
    ece, seconds = (sum(f[key] for f in found) / len(found) for key in ("r_ece", "seconds"))
    return " | ".join(shown) + f"{f', {failed} diverged' if failed else ''} | {ece:.4f} | {seconds:.0f}"


def load_runs(results):
    path = results / "runs.jsonl"
    runs = read_lines(path)
    for found in runs:
        numbers = ("seed", "budget") if "error" in found else ("seed", "budget", "seconds", "mse", "nll", "r_ece")
        check_keys(path, found, ["settings"], REMEDY)
        check_numbers(path, found, numbers, REMEDY)
    return runs


def report(results):
    runs = load_runs(results)
    if not runs:
        print("Nothing has been run yet.")
        return
    by_setting = defaultdict(list)
    for found in runs:
        by_setting[json.dumps(found["settings"], sort_keys=True)].append(found)
    lines = ["| changed | value | MSE (range) | NLL (range) | R-ECE | training, s |", "|---|---|---|---|---|---|"]
    points = {}
    for name, values in VALUES.items():
        for value in values:
            found = by_setting.get(json.dumps(settings(name, value), sort_keys=True), [])
            points[name, value] = finished = [f for f in found if "error" not in f]
            if found:
                lines.append(f"| {TITLES[name]} | {value:g} | {line(finished, len(found) - len(finished))} |")
    plot(points, results / "study.png")
    budget, seeds = runs[0]["budget"], len({found["seed"] for found in runs})
    setup = (
        f"Made by `python benchmarks/sine_line_study.py`. {machine()}. NIW with a Bayesian ridge head, {budget:,} "
        f"batches of {TASKS} tasks, {seeds} seeds, validation tasks. Others as in {BASE}."
    )
    print(
        page(
            results, "Steps, burn-in, posterior samples and n_0", ["![MSE and NLL](study.png)", "\n".join(lines)], setup
        )
    )


def plot(points, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(VALUES), figsize=(3.6 * len(VALUES), 5.5), sharey="row")
    for column, (name, values) in zip(axes.T, VALUES.items()):
        known = [value for value in values if points[name, value]]
        for axis, metric in zip(column, ("mse", "nll")):
            for value in known:
                axis.plot(
                    [value] * len(points[name, value]), [f[metric] for f in points[name, value]], "C0.", alpha=0.5
                )
            means = [sum(f[metric] for f in points[name, v]) / len(points[name, v]) for v in known]
            axis.plot(known, means, "C0-")
            axis.set_ylabel(metric.upper() if name == "steps" else "")
            if name not in ("steps", "burn_in"):
                axis.set_xscale("log")
        column[1].set_xlabel(TITLES[name])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of initial weights and tasks")
    parser.add_argument("--budget", type=int, default=2500, help=f"batches of {TASKS} tasks")
    parser.add_argument("--test-tasks", type=int, default=4000, help="validation tasks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--report", action="store_true", help="only the table and the plot of what has been run")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / "runs.jsonl"
    if not args.report:
        done = [(found["settings"], found["seed"], found["budget"]) for found in load_runs(args.results)]
        for chosen in trainings():
            built = {}
            for seed in args.seeds:
                if (chosen, seed, args.budget) not in done:
                    found = list(run(chosen, seed, args.budget, args.test_tasks, built))
                    with path.open("a") as file:
                        file.writelines(json.dumps(f) + "\n" for f in found)
    report(args.results)


if __name__ == "__main__":
    try:
        main()
    except NIWError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
