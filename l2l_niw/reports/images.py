"""Table and plots of a comparison of image classifiers: a folder for every method and seed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

import numpy as np
import torch

from l2l_niw.calibration import Reliability, plot_reliability
from l2l_niw.errors import require
from l2l_niw.metrics import Interval, bootstrap
from l2l_niw.vision.config import Config
from l2l_niw.vision.methods import METHODS
from l2l_niw.vision.runs import read_log

COMMON = ("dataset", "ways", "shots", "queries", "train_queries", "filters", "iterations", "meta_batch", "test_tasks")
OWN = ("lr", "inner_lr", "steps", "temperature")


class Run(NamedTuple):
    """One method with one seed. `tasks` has every test task's own values, where that file is at hand."""

    config: Config
    metrics: Dict[str, float]
    log: List[Dict[str, float]]
    tasks: Optional[Dict[str, np.ndarray]]


def load(folder: Path) -> Dict[str, List[Run]]:
    """{method: its runs, by seed}, in the order of `METHODS`."""
    found: Dict[str, List[Run]] = {name: [] for name in METHODS}
    for path in sorted((folder / "runs").glob("*/metrics.json")):
        tasks = path.parent / "tasks.npz"
        own = dict(np.load(tasks)) if tasks.exists() else None
        run = Run(Config.load(path.parent), json.loads(path.read_text()), read_log(path.parent), own)
        found[run.config.method].append(run)
    return {name: runs for name, runs in found.items() if runs}


def mean_and_error(runs: List[Run], key: str, factor: float = 1.0, digits: int = 3) -> str:
    """Mean and standard error over seeds."""
    values = factor * np.array([run.metrics[key] for run in runs])
    shown = f"{values.mean():.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ± {values.std(ddof=1) / len(values) ** 0.5:.{digits}f}"


def interval(runs: List[Run], others: Optional[List[Run]] = None, key: str = "accuracy") -> Optional[Interval]:
    """95% over test tasks and seeds, of a method's values or of its difference to another's on the same tasks."""
    everything = [*runs, *(others or [])]
    if any(run.tasks is None for run in everything):
        return None
    values = torch.stack([torch.from_numpy(run.tasks[key]) for run in runs])
    if others is not None:
        theirs = torch.stack([torch.from_numpy(run.tasks[key]) for run in others])
        if len(theirs) != len(values):
            values, theirs = values.mean(0), theirs.mean(0)
        values = values - theirs
    return bootstrap(values)


def kept_intervals(folder: Path, methods: Dict[str, List[Run]]) -> Dict[str, Dict[str, Interval]]:
    """Intervals need tasks.npz, which are large: what was computed where they were at hand is kept."""
    path = folder / "intervals.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for name, runs in methods.items():
        twin = methods.get(METHODS[name].twin)
        for title, found in (("accuracy", interval(runs)), ("difference", twin and interval(runs, twin))):
            if found is not None:
                kept.setdefault(name, {})[title] = found
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return kept


def percent(found: Optional[Interval], sign: str = "") -> str:
    if found is None:
        return ""
    mean, low, high = (100 * value for value in found)
    return f"{mean:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def table(methods: Dict[str, List[Run]], kept: Dict[str, Dict[str, Interval]]) -> str:
    lines = [
        "| method | seeds | accuracy % (95%) | - twin's (95%) | ECE % | ECE+TS % | all-class ECE % | NLL | Brier | "
        "training, s | memory, MB | settings |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in methods.items():
        own, config = kept.get(name, {}), asdict(runs[0].config)
        lines.append("| " + " | ".join([
            METHODS[name].title,
            str(len(runs)),
            percent(own.get("accuracy")),
            percent(own.get("difference"), "+"),
            mean_and_error(runs, "ece", 100, 2),
            mean_and_error(runs, "ece_ts", 100, 2),
            mean_and_error(runs, "ece_all", 100, 2),
            mean_and_error(runs, "nll"),
            mean_and_error(runs, "brier"),
            f"{np.mean([run.metrics['seconds'] for run in runs]):.0f}",
            f"{np.mean([run.metrics['memory'] for run in runs]):.0f}",
            ", ".join(f"{key} {config[key]:g}" for key in OWN if config[key] is not None),
        ]) + " |")  # fmt: skip
    return "\n".join(lines)


def plot_curves(methods: Dict[str, List[Run]], path: Path) -> None:
    """Validation accuracy and NLL on the way, means over seeds: whether methods had converged."""
    require("matplotlib", "examples").use("Agg")
    pyplot = require("matplotlib.pyplot", "examples")
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5))
    for i, (name, runs) in enumerate(methods.items()):
        style = {"color": f"C{i % 10}", "ls": "-" if name.startswith("niw") else "--", "label": METHODS[name].title}
        x = [line["iteration"] for line in runs[0].log]
        for ax, key in zip(axes, ("validation_accuracy", "validation_nll")):
            ax.plot(x, np.mean([[line[key] for line in run.log] for run in runs], 0), **style)
            ax.set(xlabel="iterations", ylabel=key.replace("_", " "))
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def pooled(runs: List[Run]) -> Optional[Reliability]:
    """The diagram of all seeds together."""
    if any(run.tasks is None for run in runs):
        return None
    counts = np.stack([run.tasks["counts"] for run in runs])
    weights = counts / np.maximum(counts.sum(0), 1)

    def mean(key: str) -> torch.Tensor:
        total = (weights * np.nan_to_num(np.stack([run.tasks[key] for run in runs]))).sum(0)
        return torch.from_numpy(np.where(counts.sum(0) > 0, total, np.nan))

    bounds = torch.from_numpy(runs[0].tasks["bounds"])
    return Reliability(bounds, mean("confidence"), mean("accuracy_by_bin"), torch.from_numpy(counts.sum(0)))


def report(folder: Path) -> str:
    """Writes README.md, curves.png and reliability.png into a comparison's folder, and returns the text."""
    methods = load(folder)
    kept = kept_intervals(folder, methods)
    config = asdict(next(iter(methods.values()))[0].config)
    plot_curves(methods, folder / "curves.png")
    diagrams = {METHODS[name].title: pooled(runs) for name, runs in methods.items()}
    if all(diagram is not None for diagram in diagrams.values()):
        plot_reliability(diagrams, folder / "reliability.png")
    budget = ", ".join(f"{key.replace('_', ' ')} {config[key]}" for key in COMMON)
    text = [
        f"# {config['dataset']}, {config['ways']}-way {config['shots']}-shot",
        table(methods, kept),
        f"Every method: {budget}; learn2learn's Conv-4, BatchNorm by the batch's statistics, Adam on a cosine. "
        "Accuracy: mean and 95% interval over test tasks and seeds; the difference to the same network without NIW is "
        "paired, task by task. Others: mean and standard error over seeds. ECE: 20 bins; +TS: after temperature "
        "scaling, fitted on validation tasks. Seconds and memory are of training, in a process of one thread.",
        "![Validation on the way](curves.png)",
        "![Reliability](reliability.png)",
    ]
    notes = folder / "notes.md"
    if notes.exists():
        text.append(notes.read_text().strip())
    (folder / "README.md").write_text("\n\n".join(text) + "\n")
    return "\n\n".join(text)
