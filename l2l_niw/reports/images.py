"""Table and plots of a comparison of image classifiers: a folder for every method and seed."""

import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from l2l_niw.errors import ArgumentError, CheckpointError, require
from l2l_niw.metrics import Interval, bootstrap
from l2l_niw.metrics.calibration import Reliability, plot_reliability
from l2l_niw.reports._intervals import Kept, kept_intervals
from l2l_niw.utils._files import read_json, write_page
from l2l_niw.vision.config import SHARED_OPTIONS, Config
from l2l_niw.vision.methods import METHOD_OPTIONS, METHODS
from l2l_niw.vision.runs import read_log


class Run(NamedTuple):
    """One method with one seed. `tasks` has every test task's own values, where that file is at hand."""

    folder: Path
    config: Config
    metrics: Dict[str, Any]
    log: List[Dict[str, float]]
    tasks: Optional[Dict[str, np.ndarray]]


def load(folder: Path) -> Dict[str, List[Run]]:
    """{method: its runs, by seed}, in the order of `METHODS`."""
    found: Dict[str, List[Run]] = {name: [] for name in METHODS}
    for path in sorted((folder / "runs").glob("*/metrics.json")):
        run = load_run(path.parent)
        found[run.config.method].append(run)
    methods = {name: runs for name, runs in found.items() if runs}
    check_equal([run for runs in methods.values() for run in runs], SHARED_OPTIONS)
    for runs in methods.values():
        check_equal(runs, METHOD_OPTIONS)
        for i, run in enumerate(runs):
            for other in runs[:i]:
                if other.config.seed == run.config.seed:
                    raise ArgumentError(f"{other.folder} and {run.folder} are of the same seed. Move one of them away.")
    return methods


def load_run(folder: Path) -> Run:
    tasks, log = folder / "tasks.npz", read_log(folder)
    if not log:
        raise CheckpointError(f"{folder} has scores, but no log.csv: train and test it anew.")
    metrics = read_json(folder / "metrics.json", "Test the run anew.")
    try:
        found = dict(np.load(tasks)) if tasks.exists() else None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{tasks} cannot be read: {error}. Test the run anew.") from error
    return Run(folder, Config.load(folder), metrics, log, found)


def check_equal(runs: List[Run], keys: Sequence[str]) -> None:
    """What is one table must have had the same tasks and the same budget, and what is one row the same settings."""
    first = runs[0]
    for run in runs[1:]:
        for key in keys:
            one, other = getattr(first.config, key), getattr(run.config, key)
            if one != other:
                raise ArgumentError(
                    f"{first.folder} and {run.folder} cannot be one table: {key} is {one} of the first, but {other} of "
                    "the second. Move one of them away."
                )


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
    What is compared task by task, with the runs of seeds that both have: NIW with its twins, and with everything else
    the NIW that is best on validation tasks, by their NLL.
    """
    own = [name for name in methods if METHODS[name].baseline is not None]
    if not own:
        return {}
    best = min(own, key=lambda name: np.mean([run.log[-1]["validation_nll"] for run in methods[name]]))
    found = [(name, baseline) for name in own if (baseline := METHODS[name].baseline) in methods]
    found += [(best, name) for name in methods if name not in own and name != METHODS[best].baseline]
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
            METHODS[other].title + (" (its twin)" if other == METHODS[one].baseline else ""),
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
    """Validation accuracy and NLL on the way, means over seeds: whether methods had converged. Twins share a colour."""
    require("matplotlib", "examples").use("Agg")
    pyplot = require("matplotlib.pyplot", "examples")
    figure, axes = pyplot.subplots(1, 2, figsize=(15, 5))
    colours = {name: f"C{i}" for i, name in enumerate(n for n, spec in METHODS.items() if spec.baseline is None)}
    for name, runs in methods.items():
        colour = colours[METHODS[name].baseline or name]
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
    found = sorted({run.metrics["machine"] for runs in methods.values() for run in runs if "machine" in run.metrics})
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
    budget = ", ".join(f"{key.replace('_', ' ')} {config[key]}" for key in SHARED_OPTIONS)
    text = [
        f"# {config['dataset']}, {config['ways']}-way {config['shots']}-shot",
        table(methods, kept),
        f"Every method: {budget}; "
        "learn2learn's Conv-4, Adam on a cosine; pretraining: epochs of telling all training classes apart, with the "
        "same weights for all methods of a seed. BatchNorm takes the statistics of the support and of the query, "
        "each by itself, as in MAML: all methods are transductive. MetaQDA as published has a fixed backbone; its "
        "other rows, and NIW with it, train the backbone too. Accuracy: mean and 95% interval over test tasks and "
        "seeds. Others: mean and standard error over seeds. ECE: 20 bins; +TS: after temperature scaling, fitted on "
        "validation tasks. Seconds are of training, on one thread; memory is the whole process's peak, with code and "
        f"images.{machines(methods)}",
    ]
    if pairs(methods):
        text += [
            "## What NIW changes",
            differences(methods, kept),
            "NIW beside its twin, the same network without it, and beside everything else the NIW with the lowest NLL "
            "on validation tasks. Differences are paired, task by task and seed by seed.",
        ]
    text.append("![Validation on the way](curves.png)")
    if (folder / "reliability.png").exists():
        text.append("![Reliability](reliability.png)")
    notes = folder / "notes.md"
    if notes.exists():
        text.append(notes.read_text().strip())
    write_page(folder / "README.md", "\n\n".join(text) + "\n")
    return "\n\n".join(text)
