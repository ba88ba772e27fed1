"""Table and plots of what `benchmarks/sine_line.py` has run."""

from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError, CheckpointError, require
from l2l_niw.metrics import Interval, bootstrap
from l2l_niw.reports._intervals import Kept, kept_intervals
from l2l_niw.reports._packed import LINES_FILE, REMEDY, check_keys, check_numbers, read_arrays, read_lines, write_lines
from l2l_niw.reports._pages import page
from l2l_niw.utils._files import read_json

Run = Dict[str, Any]
Rows = Dict[str, List[Run]]

METRICS = ("mse", "nll")
NUMBERS = ("seed", "budget", "batch", "test_tasks", *METRICS, "r_ece", "seconds", "parameters")
LISTS = ("reliability", "curve")
OTHERS = ("row", "title", "baseline", "machine")
PAPER = {"ridge": "0.8210", "maml-1": "0.8206", "maml-5": "0.8309", "pmaml": "0.9160", "niw-ridge": "0.7822"}
RUN_AGAIN = "Run the row anew."


def load_runs(results: Path) -> Dict[Tuple[str, int], Run]:
    """{(row, seed): run}, in that order. A run's own file wins over what was packed of it."""
    found = [(results / LINES_FILE, run, REMEDY) for run in read_lines(results / LINES_FILE)]
    for path in sorted((results / "runs").glob("*.json")):
        found.append((path, read_json(path, RUN_AGAIN), RUN_AGAIN))
    for path, run, remedy in found:
        check_run(path, run, remedy)
    runs = {(run["row"], run["seed"]): run for _, run, _ in found}
    return {key: runs[key] for key in sorted(runs)}


def check_run(path: Path, run: Any, remedy: str) -> None:
    """Raises a `CheckpointError` unless a run has all keys of the report, and numbers where it needs them."""
    check_keys(path, run, (*OTHERS, *LISTS), remedy)
    check_numbers(path, run, NUMBERS, remedy)
    for key in LISTS:
        if not isinstance(run[key], list) or not all(isinstance(number, (int, float)) for number in run[key]):
            raise CheckpointError(f"{path}: {key} must be a list of numbers. {remedy}")


def check_equal(results: Path, one: Run, other: Run, keys: Sequence[str]) -> None:
    """What is one table must have had the same test tasks, and what is one row the same budget."""
    for key in keys:
        values = [len(run[key]) if key in LISTS else run[key] for run in (one, other)]
        if values[0] != values[1]:
            raise ArgumentError(
                f"{results}: {one['row']}-{one['seed']} and {other['row']}-{other['seed']} cannot be one table: "
                f"{'the length of ' if key in LISTS else ''}{key} is {values[0]} of the first, but {values[1]} of the "
                "second. Run one of them anew."
            )


def load(results: Path) -> Rows:
    """{row: its runs, by seed}, the row with the lowest error first."""
    found: Rows = defaultdict(list)
    for (row, _), run in load_runs(results).items():
        found[row].append(run)
    if not found:
        raise CheckpointError(f"{results / LINES_FILE} holds no runs. {REMEDY}")
    first = next(iter(found.values()))[0]
    for runs in found.values():
        check_equal(results, first, runs[0], ["test_tasks"])
        for run in runs[1:]:
            check_equal(results, runs[0], run, ["test_tasks", "budget", *LISTS])
    return dict(sorted(found.items(), key=lambda item: average(item[1], "mse")))


def pack(results: Path) -> None:
    """Writes results.jsonl: all runs, those packed before included."""
    write_lines(results / LINES_FILE, load_runs(results).values())


def by_task(results: Path, runs: List[Run], metric: str) -> Optional[Tensor]:
    """One value per run and task, (runs, tasks), or None where the files with them are not at hand."""
    paths = [results / "tasks" / f"{run['row']}-{run['seed']}.npz" for run in runs]
    if not all(path.exists() for path in paths):
        return None
    values = []
    for path, run in zip(paths, runs):
        values.append(torch.from_numpy(read_arrays(path, [metric], RUN_AGAIN)[metric]))
        if values[-1].shape != (run["test_tasks"],):
            raise CheckpointError(f"{path}: {metric} must be of {run['test_tasks']} tasks. {RUN_AGAIN}")
    return torch.stack(values)


def intervals(results: Path, rows: Rows) -> Kept:
    """{row: {metric: interval, 'metric - other': interval of the paired difference}}."""
    found = {}
    for row, runs in rows.items():
        against = [other for other in dict.fromkeys(["ridge", runs[0]["baseline"]]) if other in rows and other != row]
        behind = [run for name in (row, *against) for run in rows[name]]
        scores = [[run["row"], run["seed"], *(run[metric] for metric in METRICS)] for run in behind]
        own = {metric: interval(results, runs, metric) for metric in METRICS}
        for metric, other in product(METRICS, against):
            own[f"{metric} - {other}"] = interval(results, runs, metric, rows[other])
        found[row] = scores, own
    return kept_intervals(results / "intervals.json", found)


def interval(results: Path, runs: List[Run], metric: str, others: Optional[List[Run]] = None) -> Optional[Interval]:
    """
    Of a row's metric, or of its difference to another row's: task by task, and seed by seed where both have the same
    seeds, else of their means over runs. None where tasks' values are not at hand, or one is infinite.
    """
    values = by_task(results, runs, metric)
    if others is not None and values is not None:
        theirs, seeds = by_task(results, others, metric), [[run["seed"] for run in both] for both in (runs, others)]
        if theirs is None:
            return None
        values = values - theirs if seeds[0] == seeds[1] else values.mean(0) - theirs.mean(0)
    return bootstrap(values) if values is not None and values.isfinite().all() else None


def shown(interval: Optional[Interval], digits: int = 3, sign: str = "") -> str:
    """An interval as 'mean (low to high)', or an empty string if it is None."""
    if interval is None:
        return ""
    mean, low, high = (f"{x:{sign}.{digits}f}" if abs(x) < 1e4 else f"{x:{sign}.1e}" for x in interval)
    return f"{mean} ({low} to {high})"


def average(runs: List[Run], key: str) -> float:
    """The mean over runs of the number under this key."""
    return sum(run[key] for run in runs) / len(runs)


def table(rows: Rows, kept: Kept) -> str:
    """The report's table in Markdown, one line per row."""
    lines = [
        "| method | MSE (95%) | NLL (95%) | R-ECE (range) | MSE - RidgeNet's (95%) | MSE - same head's | "
        "NLL - same head's | training, s | trained numbers | paper's MSE |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, runs in rows.items():
        own, baseline, eces = kept.get(row, {}), runs[0]["baseline"], [run["r_ece"] for run in runs]
        lines.append("| " + " | ".join([
            runs[0]["title"],
            shown(own.get("mse")) or f"{average(runs, 'mse'):.3f}",
            shown(own.get("nll")) or f"{average(runs, 'nll'):.3f}",
            f"{average(runs, 'r_ece'):.4f} ({min(eces):.4f} to {max(eces):.4f})",
            shown(own.get("mse - ridge"), sign="+"),
            shown(own.get(f"mse - {baseline}"), sign="+"),
            shown(own.get(f"nll - {baseline}"), sign="+"),
            f"{average(runs, 'seconds'):.0f}" if runs[0]["parameters"] else "",
            f"{runs[0]['parameters']:,}" if runs[0]["parameters"] else "",
            PAPER.get(row, ""),
        ]) + " |")  # fmt: skip
    return "\n".join(lines)


def plot(rows: Rows, path: Path) -> None:
    """Writes a picture of the training curves and the calibration of all rows."""
    require("matplotlib", "examples").use("Agg")
    pyplot = require("matplotlib.pyplot", "examples")
    figure, (curves, calibration) = pyplot.subplots(1, 2, figsize=(14, 5), layout="constrained")
    heads = list(dict.fromkeys(runs[0]["baseline"] or row for row, runs in rows.items()))
    colours = pyplot.get_cmap("tab10" if len(heads) <= 10 else "tab20")
    for row, runs in rows.items():
        line = (":" if row.endswith("ggn") else "-") if row.startswith("niw") else "--" if row in heads else "-."
        style = {"color": colours(heads.index(runs[0]["baseline"] or row)), "ls": line, "lw": 1.3}
        curve = np.mean([run["curve"] for run in runs], 0)
        x = np.linspace(0, runs[0]["budget"], len(curve) + 1)[1:]
        curves.plot(x, curve, label=runs[0]["title"], **style)
        fractions = np.mean([run["reliability"] for run in runs], 0)
        levels = np.linspace(0, 1, len(fractions) + 1)[1:]
        calibration.plot(levels, fractions - levels, label=runs[0]["title"], **style)
    curves.set(xlabel="batches of tasks", ylabel="training: query NLL", ylim=(0.2, 3.0))
    calibration.axhline(0, color="k", lw=0.8)
    calibration.set(xlabel="level p", ylabel="fraction of targets below the p-quantile, minus p")
    figure.legend(*calibration.get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def report(results: Path) -> str:
    """Writes README.md and curves.png beside the runs, and returns the text."""
    rows = load(results)
    kept = intervals(results, rows)
    trained = {row: runs for row, runs in rows.items() if runs[0]["parameters"]}
    first = next(iter((trained or rows).values()))[0]
    budgets = sorted({run["budget"] for runs in trained.values() for run in runs})
    seeds = sorted({len(runs) for runs in trained.values()})
    parts = [table(rows, kept)]
    if trained:
        plot(trained, results / "curves.png")
        parts.append("![Training curves and calibration](curves.png)")
    setup = (
        f"Made by `python benchmarks/sine_line.py`. {first['machine']}. Every row: "
        f"{' or '.join(f'{b:,}' for b in budgets)} batches of {first['batch']} tasks, {' or '.join(map(str, seeds))} "
        f"seeds, scored on the same {first['test_tasks']:,} test tasks. Four settings of each row were tried on "
        "validation tasks with fewer batches (`tuning.jsonl`). Intervals resample tasks and seeds, 2,000 times; "
        "differences are paired, task by task and seed by seed. NIW predicts with 10 posterior samples."
    )
    return page(results, "Sine-Line", parts, setup)
