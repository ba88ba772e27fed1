"""Table and plots of what `benchmarks/sine_line.py` has run: a JSON file for every row and seed."""

from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Dict, List, Optional

import numpy as np
import torch
from torch import Tensor

from l2l_niw.errors import require
from l2l_niw.metrics import Interval, bootstrap
from l2l_niw.reports._intervals import Kept, kept_intervals
from l2l_niw.utils._files import read_json, write_page

Rows = Dict[str, List[dict]]

METRICS = ("mse", "nll")
PAPER = {"ridge": "0.8210", "maml-1": "0.8206", "maml-5": "0.8309", "pmaml": "0.9160", "niw-ridge": "0.7822"}


def load(results: Path) -> Rows:
    """{row: its runs, by seed}, the row with the lowest error first."""
    found = defaultdict(list)
    for path in sorted((results / "runs").glob("*.json")):
        run = read_json(path, "Run the row anew.")
        found[run["row"]].append(run)
    for runs in found.values():
        runs.sort(key=lambda run: run["seed"])
    return dict(sorted(found.items(), key=lambda item: average(item[1], "mse")))


def by_task(results: Path, runs: List[dict], metric: str) -> Optional[Tensor]:
    """One value a run and task, (runs, tasks), or None where the files with them are not at hand."""
    paths = [results / "tasks" / f"{run['row']}-{run['seed']}.npz" for run in runs]
    if not all(path.exists() for path in paths):
        return None
    return torch.stack([torch.from_numpy(np.load(path)[metric]) for path in paths])


def intervals(results: Path, rows: Rows) -> Kept:
    """{row: {metric: interval, 'metric - other': interval of the paired difference}}."""
    found = {}
    for row, runs in rows.items():
        against = [other for other in dict.fromkeys(["ridge", runs[0]["twin"]]) if other in rows and other != row]
        behind = [run for name in (row, *against) for run in rows[name]]
        scores = [[run["row"], run["seed"], *(run[metric] for metric in METRICS)] for run in behind]
        own = {metric: interval(results, runs, metric) for metric in METRICS}
        for metric, other in product(METRICS, against):
            own[f"{metric} - {other}"] = interval(results, runs, metric, rows[other])
        found[row] = scores, own
    return kept_intervals(results / "intervals.json", found)


def interval(results: Path, runs: List[dict], metric: str, others: Optional[List[dict]] = None) -> Optional[Interval]:
    """
    Of a row's metric, or of its difference to another row's: task by task, and seed by seed where both have the same
    seeds, else of their means over runs. None where tasks' values are not at hand, or one has flown off to infinity.
    """
    values = by_task(results, runs, metric)
    if others is not None and values is not None:
        theirs, seeds = by_task(results, others, metric), [[run["seed"] for run in both] for both in (runs, others)]
        if theirs is None:
            return None
        values = values - theirs if seeds[0] == seeds[1] else values.mean(0) - theirs.mean(0)
    return bootstrap(values) if values is not None and values.isfinite().all() else None


def shown(interval: Optional[Interval], digits: int = 3, sign: str = "") -> str:
    if interval is None:
        return ""
    mean, low, high = (f"{x:{sign}.{digits}f}" if abs(x) < 1e4 else f"{x:{sign}.1e}" for x in interval)
    return f"{mean} ({low} to {high})"


def average(runs: List[dict], key: str) -> float:
    return sum(run[key] for run in runs) / len(runs)


def table(rows: Rows, kept: Kept) -> str:
    lines = [
        "| method | MSE (95%) | NLL (95%) | R-ECE (range) | MSE - RidgeNet's (95%) | MSE - same head's | "
        "NLL - same head's | training, s | trained numbers | paper's MSE |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, runs in rows.items():
        own, twin, eces = kept.get(row, {}), runs[0]["twin"], [run["r_ece"] for run in runs]
        lines.append("| " + " | ".join([
            runs[0]["title"],
            shown(own.get("mse")) or f"{average(runs, 'mse'):.3f}",
            shown(own.get("nll")) or f"{average(runs, 'nll'):.3f}",
            f"{average(runs, 'r_ece'):.4f} ({min(eces):.4f} to {max(eces):.4f})",
            shown(own.get("mse - ridge"), sign="+"),
            shown(own.get(f"mse - {twin}"), sign="+"),
            shown(own.get(f"nll - {twin}"), sign="+"),
            f"{average(runs, 'seconds'):.0f}" if runs[0]["parameters"] else "",
            f"{runs[0]['parameters']:,}" if runs[0]["parameters"] else "",
            PAPER.get(row, ""),
        ]) + " |")  # fmt: skip
    return "\n".join(lines)


def plot(rows: Rows, path: Path) -> None:
    require("matplotlib", "examples").use("Agg")
    pyplot = require("matplotlib.pyplot", "examples")
    figure, (curves, calibration) = pyplot.subplots(1, 2, figsize=(14, 5), layout="constrained")
    heads = list(dict.fromkeys(runs[0]["twin"] or row for row, runs in rows.items()))
    colours = pyplot.get_cmap("tab10" if len(heads) <= 10 else "tab20")
    for row, runs in rows.items():
        line = (":" if row.endswith("ggn") else "-") if row.startswith("niw") else "--" if row in heads else "-."
        style = {"color": colours(heads.index(runs[0]["twin"] or row)), "ls": line, "lw": 1.3}
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
    text = [
        "# Sine-Line",
        f"Made by `python benchmarks/sine_line.py`. {first['machine']}. Every row: "
        f"{' or '.join(f'{b:,}' for b in budgets)} batches of {first['batch']} tasks, {' or '.join(map(str, seeds))} "
        f"seeds, scored on the same {first['test_tasks']:,} test tasks. Four settings of each row were tried on "
        "validation tasks with fewer batches (`tuning.jsonl`). Intervals resample tasks and seeds, 2,000 "
        "times; differences are paired, task by task and seed by seed. NIW predicts with 10 networks.",
        table(rows, kept),
    ]
    if trained:
        plot(trained, results / "curves.png")
        text.append("![Training curves and calibration](curves.png)")
    notes = results / "notes.md"
    if notes.exists():
        text.append(notes.read_text().strip())
    write_page(results / "README.md", "\n\n".join(text) + "\n")
    return "\n\n".join(text)
