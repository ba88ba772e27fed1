"""Tables and plots of what `sine_line.py` has run."""

import json
from collections import defaultdict

import numpy as np
import torch
from processes import publish
from regression.rows import BAYES, ROWS
from regression.training import TASKS

from l2l_niw.metrics import bootstrap

METRICS = ("mse", "nll")
PAPER = {"ridge": "0.8210", "maml-1": "0.8206", "maml-5": "0.8309", "pmaml": "0.9160", "niw-ridge": "0.7822"}


def load(results):
    """{row: its runs, by seed}."""
    found = defaultdict(list)
    for path in sorted((results / "runs").glob("*.json")):
        run = json.loads(path.read_text())
        found[run["row"]].append(run)
    return found


def by_task(results, runs, metric):
    """One value a run and task, (runs, tasks), or None where the files with them are not at hand."""
    paths = [results / "tasks" / f"{run['row']}-{run['seed']}.npz" for run in runs]
    if not all(path.exists() for path in paths):
        return None
    return torch.stack([torch.from_numpy(np.load(path)[metric]) for path in paths])


def intervals(results, rows):
    """
    {row: {metric: interval, 'metric - other': interval of the paired difference}}. Differences need every task's own
    value, and those files are large: what was computed where they were at hand is kept in intervals.json.
    """
    path = results / "intervals.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for row, runs in rows.items():
        twin = ROWS[row].twin if row in ROWS else None
        against = [other for other in dict.fromkeys(["ridge", twin]) if other in rows and other != row]
        for metric in METRICS:
            own = by_task(results, runs, metric)
            if own is None:
                continue
            kept.setdefault(row, {})[metric] = bootstrap(own)
            for other in against:
                theirs = by_task(results, rows[other], metric)
                if theirs is not None:
                    kept[row][f"{metric} - {other}"] = paired(own, theirs)
    path.write_text(json.dumps(kept, indent=1))
    return kept


def paired(own, theirs):
    """The difference task by task: run by run where both have the same number, else of their means over runs."""
    if len(own) != len(theirs):
        own, theirs = own.mean(0), theirs.mean(0)
    return bootstrap(own - theirs)


def shown(interval, digits=3, sign=""):
    if interval is None:
        return ""
    mean, low, high = interval
    return f"{mean:{sign}.{digits}f} ({low:{sign}.{digits}f} to {high:{sign}.{digits}f})"


def average(runs, key):
    return sum(run[key] for run in runs) / len(runs)


def table(rows, kept):
    lines = [
        "| method | MSE (95%) | NLL (95%) | R-ECE (range) | MSE - RidgeNet's (95%) | MSE - same head's | "
        "NLL - same head's | training, s | trained numbers | paper's MSE |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (BAYES, *ROWS):
        if row not in rows:
            continue
        runs, own = rows[row], kept.get(row, {})
        twin = ROWS[row].twin if row in ROWS else None
        eces = [run["r_ece"] for run in runs]
        lines.append("| " + " | ".join([
            ROWS[row].title if row in ROWS else "Bayes-optimal",
            shown(own.get("mse")),
            shown(own.get("nll")),
            f"{average(runs, 'r_ece'):.4f} ({min(eces):.4f} to {max(eces):.4f})",
            shown(own.get("mse - ridge"), sign="+"),
            shown(own.get(f"mse - {twin}"), sign="+"),
            shown(own.get(f"nll - {twin}"), sign="+"),
            f"{average(runs, 'seconds'):.0f}" if row in ROWS else "",
            f"{runs[0]['parameters']:,}" if row in ROWS else "",
            PAPER.get(row, ""),
        ]) + " |")  # fmt: skip
    return "\n".join(lines)


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, calibration) = plt.subplots(1, 2, figsize=(13, 5))
    for i, row in enumerate(r for r in ROWS if r in rows):
        runs, style = rows[row], {"color": f"C{i % 10}", "ls": "-" if row.startswith("niw") else "--", "lw": 1.2}
        curve = np.mean([run["curve"] for run in runs], 0)
        x = np.linspace(0, runs[0]["budget"], len(curve) + 1)[1:]
        curves.plot(x, curve, label=ROWS[row].title, **style)
        fractions = np.mean([run["reliability"] for run in runs], 0)
        levels = np.linspace(0, 1, len(fractions) + 1)[1:]
        calibration.plot(levels, fractions - levels, label=ROWS[row].title, **style)
    curves.set(xlabel=f"batches of {TASKS} tasks", ylabel="training: query NLL", ylim=(0.2, 3.0))
    calibration.axhline(0, color="k", lw=0.8)
    calibration.set(xlabel="level p", ylabel="fraction of targets below the p-quantile, minus p")
    calibration.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def report(results):
    rows = load(results)
    if not rows:
        print("Nothing has been run yet.")
        return
    kept = intervals(results, rows)
    trained = [run for row in rows for run in rows[row] if row in ROWS]
    budgets = sorted({run["budget"] for run in trained})
    seeds = sorted({len(runs) for row, runs in rows.items() if row in ROWS})
    text = [
        "# Sine-Line",
        f"Made by `python benchmarks/sine_line.py`. {next(iter(rows.values()))[0]['machine']}. Every row: "
        f"{' or '.join(f'{b:,}' for b in budgets)} batches of {TASKS} tasks, {' or '.join(map(str, seeds))} seeds, "
        f"scored on the same {next(iter(rows.values()))[0]['test_tasks']:,} test tasks. Four settings of each row were "
        "tried on validation tasks at a quarter of the budget (`tuning.jsonl`). Intervals resample tasks and seeds, "
        "2,000 times; differences are paired, task by task and seed by seed. `niw-*` predict with 10 networks.",
        table(rows, kept),
        "![Training curves and calibration](curves.png)",
    ]
    notes = results / "notes.md"
    if notes.exists():
        text.append(notes.read_text().strip())
    if trained:
        plot(rows, results / "curves.png")
    publish("\n\n".join(text) + "\n", results / "README.md")
