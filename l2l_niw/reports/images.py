"""Table and plots of a comparison of image classifiers."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch

from l2l_niw.errors import require
from l2l_niw.metrics import Interval, bootstrap
from l2l_niw.metrics.calibration import Reliability, plot_reliability
from l2l_niw.reports import image_runs, image_shift
from l2l_niw.reports._intervals import Kept, kept_intervals
from l2l_niw.reports._pages import page
from l2l_niw.reports.image_runs import Run, load
from l2l_niw.vision.config import SHARED_OPTIONS
from l2l_niw.vision.methods import METHOD_OPTIONS, METHODS

CONV4 = (
    "The backbone is learn2learn's Conv-4; pretraining: epochs of supervised pretraining on all training classes, with "
    "the same weights for all methods of a seed."
)
TRANSFORMER = (
    "The backbone is a pretrained transformer, of which the last blocks are trained, or none where it is fixed; "
    "features have one length."
)
OF_CONV4 = ("filters", "pretraining", "backbones", "batchnorm")  # settings that a transformer has no use for
STATISTICS = {
    "batch": "BatchNorm takes the statistics of the support and of the query, each by itself, as in MAML: all methods "
    "are transductive.",
    "running": "BatchNorm has the pretraining's statistics, so that a query is predicted by itself, but in rows that "
    "are called transductive.",
}


def baseline(method: str) -> Optional[str]:
    """The same network without NIW."""
    return METHODS[method].baseline


def mean_and_error(runs: List[Run], key: str, factor: float = 1.0, digits: int = 3) -> str:
    """Mean and standard error over seeds."""
    if any(run.metrics[key] is None for run in runs):
        return ""
    found = factor * np.array([run.metrics[key] for run in runs])
    shown = f"{found.mean():.{digits}f}"
    return shown if len(found) == 1 else f"{shown} ± {found.std(ddof=1) / len(found) ** 0.5:.{digits}f}"


def values(runs: List[Run], key: str) -> Dict[int, torch.Tensor]:
    """Every seed's scores, task by task, where their files are at hand."""
    return {run.config.seed: torch.from_numpy(run.tasks[key]) for run in runs if run.tasks is not None}


def interval(runs: List[Run], others: Optional[List[Run]] = None, key: str = "accuracy") -> Optional[Interval]:
    """
    95% over test tasks and seeds, of a method's score, or of its difference to another's on the same tasks with the
    same seeds. None where a file with the tasks' own values, or a seed, is missing, or a likelihood is zero.
    """
    own = values(runs, key)
    theirs = {seed: torch.zeros(()) for seed in own} if others is None else values(others, key)
    if len(own) < len(runs) or set(theirs) != set(own):
        return None
    differences = torch.stack([own[seed] - theirs[seed] for seed in own])
    return bootstrap(differences) if differences.isfinite().all() else None


def with_common_seeds(one: List[Run], other: List[Run]) -> Tuple[List[Run], List[Run]]:
    seeds = {run.config.seed for run in one} & {run.config.seed for run in other}
    return [run for run in one if run.config.seed in seeds], [run for run in other if run.config.seed in seeds]


def pairs(methods: Dict[str, List[Run]]) -> Dict[Tuple[str, str], Tuple[List[Run], List[Run]]]:
    """
    What is compared task by task, with the runs of seeds that both have: NIW with its baselines, and with everything
    else the NIW that is best on validation tasks, by their NLL.
    """
    baselines = {name: baseline(name) for name in methods}
    own = [name for name, other in baselines.items() if other is not None]
    if not own:
        return {}
    best = min(own, key=lambda name: np.mean([run.log[-1]["validation_nll"] for run in methods[name]]))
    found = [(name, other) for name, other in baselines.items() if other in methods]
    found += [(best, name) for name in methods if name not in own and name != baselines[best]]
    runs = {(one, other): with_common_seeds(methods[one], methods[other]) for one, other in found}
    return {pair: both for pair, both in runs.items() if both[0]}


def intervals(folder: Path, methods: Dict[str, List[Run]]) -> Kept:
    """Of every method's accuracy, and of the differences of pairs."""

    def scores(runs: List[Run]) -> List[list]:
        return [[run.config.method, run.config.seed, run.metrics["accuracy"]] for run in runs]

    found = {name: (scores(runs), {"accuracy": interval(runs)}) for name, runs in methods.items()}
    for (one, other), both in pairs(methods).items():
        differences = {key: interval(*both, key) for key in ("accuracy", "nll")}
        found[f"{one} - {other}"] = scores(both[0] + both[1]), differences
    return kept_intervals(folder / "intervals.json", found)


def shown(found: Optional[Interval], form: str = ".2f", factor: float = 100.0) -> str:
    if found is None:
        return ""
    mean, low, high = (factor * value for value in found)
    return f"{mean:{form}} ({low:{form}} to {high:{form}})"


def table(methods: Dict[str, List[Run]], kept: Kept) -> str:
    lines = [
        "| method | seeds | accuracy % (95%) | ECE % | ECE+TS % | all-class ECE % | NLL | Brier | "
        "training, s | memory, MB | settings |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in methods.items():
        own, config = kept.get(name, {}), asdict(runs[0].config)
        lines.append("| " + " | ".join([
            METHODS[name].title,
            str(len(runs)),
            shown(own.get("accuracy")) or mean_and_error(runs, "accuracy", 100, 2),
            mean_and_error(runs, "ece", 100, 2),
            mean_and_error(runs, "ece_ts", 100, 2),
            mean_and_error(runs, "ece_all", 100, 2),
            mean_and_error(runs, "nll"),
            mean_and_error(runs, "brier"),
            f"{np.mean([run.metrics['seconds'] for run in runs]):.0f}",
            f"{np.mean([run.metrics['memory'] for run in runs]):.0f}",
            ", ".join(f"{key} {config[key]:g}" for key in METHOD_OPTIONS if config[key] is not None),
        ]) + " |")  # fmt: skip
    return "\n".join(lines)


def differences(methods: Dict[str, List[Run]], kept: Kept) -> str:
    lines = [
        "| NIW | against | seeds | accuracy, points (95%) | NLL (95%) | ECE / the other's | ECE+TS / the other's |",
        "|---|---|---|---|---|---|---|",
    ]
    for (one, other), both in pairs(methods).items():
        own = kept[f"{one} - {other}"]
        lines.append("| " + " | ".join([
            METHODS[one].title,
            METHODS[other].title + (" (its baseline)" if other == baseline(one) else ""),
            str(len(both[0])),
            shown(own.get("accuracy"), "+.2f"),
            shown(own.get("nll"), "+.4f", 1.0),
            ratio(*both, "ece"),
            ratio(*both, "ece_ts"),
        ]) + " |")  # fmt: skip
    return "\n".join(lines)


def ratio(runs: List[Run], others: List[Run], key: str) -> str:
    """Of a score's means over seeds; empty where a run has none."""
    found = [[run.metrics[key] for run in part] for part in (runs, others)]
    return "" if None in found[0] + found[1] else f"{np.mean(found[0]) / np.mean(found[1]):.2f}"


def plot_curves(methods: Dict[str, List[Run]], path: Path) -> None:
    """Accuracy and NLL of validation rounds, means over seeds: had they converged? A baseline has its NIW's colour."""
    require("matplotlib", "examples").use("Agg")
    pyplot = require("matplotlib.pyplot", "examples")
    figure, axes = pyplot.subplots(1, 2, figsize=(15, 5))
    colours = {name: f"C{i}" for i, name in enumerate(n for n in METHODS if baseline(n) is None)}
    for name, runs in methods.items():
        colour = colours[baseline(name) or name]
        style = {"color": colour, "ls": "-" if name.startswith("niw") else "--", "label": METHODS[name].title}
        x = [line["iteration"] for line in runs[0].log]
        for ax, key in zip(axes, ("validation_accuracy", "validation_nll")):
            ax.plot(x, np.mean([[line[key] for line in run.log] for run in runs], 0), **style)
            ax.set(xlabel="iterations", ylabel=key.replace("_", " "))
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def pooled(runs: List[Run]) -> Optional[Reliability]:
    """The diagram of all seeds together."""
    tasks = [run.tasks for run in runs if run.tasks is not None]
    if len(tasks) < len(runs):
        return None
    counts = np.stack([own["counts"] for own in tasks])
    weights = counts / np.maximum(counts.sum(0), 1)

    def mean(key: str) -> torch.Tensor:
        total = (weights * np.nan_to_num(np.stack([own[key] for own in tasks]))).sum(0)
        return torch.from_numpy(np.where(counts.sum(0) > 0, total, np.nan))

    bounds = torch.from_numpy(tasks[0]["bounds"])
    return Reliability(bounds, mean("confidence"), mean("accuracy_by_bin"), torch.from_numpy(counts.sum(0)))


def machines(methods: Dict[str, List[Run]]) -> str:
    """Where runs were tested, of those that say so."""
    found = sorted(
        {str(run.metrics["machine"]) for runs in methods.values() for run in runs if "machine" in run.metrics}
    )
    return f" Run on {'; '.join(found)}." if found else ""


def report(folder: Path) -> str:
    """Writes README.md, curves.png and reliability.png into a comparison's folder, and returns the text."""
    methods = load(folder)
    kept = intervals(folder, methods)
    config = asdict(next(iter(methods.values()))[0].config)
    plot_curves(methods, folder / "curves.png")
    pools = {METHODS[name].title: pooled(runs) for name, runs in methods.items()}
    diagrams = {title: diagram for title, diagram in pools.items() if diagram is not None}
    if len(diagrams) == len(pools):
        plot_reliability(diagrams, folder / "reliability.png")
    results = [table(methods, kept)]
    if pairs(methods):
        results += ["## What NIW changes", differences(methods, kept)]
    results.append("![Validation accuracy and NLL during training](curves.png)")
    if (folder / "reliability.png").exists():
        results.append("![Reliability](reliability.png)")
    results += image_shift.section(folder)
    title = f"{config['dataset']}, {config['ways']}-way {config['shots']}-shot"
    return page(folder, title, results, setup(methods, config))


def pack(folder: Path) -> None:
    """Writes what the report needs of all runs into one file, and what was scored under shift into another."""
    image_runs.pack(folder)
    image_shift.pack(folder)


def setup(methods: Dict[str, List[Run]], config: Dict[str, Any]) -> str:
    """How the table was made."""
    transformer = config["backbone"] != "conv4"
    unused = OF_CONV4 if transformer else ("backbone", "blocks")
    budget = ", ".join(f"{key.replace('_', ' ')} {config[key]}" for key in SHARED_OPTIONS if key not in unused)
    network = TRANSFORMER if transformer else f"{CONV4} {STATISTICS[config['batchnorm']]}"
    text = (
        f"Every method: {budget}; Adam on a cosine. {network} MetaQDA as published has a fixed backbone; its other "
        "rows, and NIW with it, train the backbone too. Accuracy: mean "
        "and 95% interval over test tasks and seeds. Others: mean and standard error over seeds. ECE: 20 bins; +TS: "
        "after temperature scaling, fitted on validation tasks. Seconds are of training, on one thread; memory is the "
        f"whole process's peak, with code and images.{machines(methods)}"
    )
    if pairs(methods):
        text += (
            "\n\nWhat NIW changes: NIW beside its baseline, the same network without it, and beside everything else "
            "the NIW with the lowest NLL on validation tasks. Differences are paired, task by task and seed by seed."
        )
    return text


__all__ = ["pack", "report"]
