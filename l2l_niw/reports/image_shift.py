"""Runs of a comparison under shift: one table, one plot."""

from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import numpy as np

from l2l_niw.errors import CheckpointError, require
from l2l_niw.reports._packed import check_keys, read_lines, write_lines
from l2l_niw.utils._files import read_json
from l2l_niw.vision.config import Config
from l2l_niw.vision.methods import METHODS
from l2l_niw.vision.shift import LEVEL, SHIFTS, TASKS

OPEN = "open set"
LINES_FILE, PLOT_FILE = "shift.jsonl", "shift.png"
OF_IMAGES = (
    "Corruptions: the mean of severities 1, 3, 5. Other classes: FC100's for CIFAR-FS, and the other way round, "
    "without those that training has images of. A linear head has no outputs for more ways. "
)
SCORE_AGAIN = "Score the run under shift anew."
Scores = Dict[str, Dict[str, Any]]  # by shift


class ShiftedRun(NamedTuple):
    """One method with one seed."""

    method: str
    seed: int
    scores: Scores


def load(folder: Path) -> Dict[str, List[ShiftedRun]]:
    """{method: its runs, by seed}, in the order of `METHODS`. A run's folder wins over what was packed of it."""
    runs = {}
    path = folder / LINES_FILE
    for line in read_lines(path):
        check_keys(path, line, ("method", "seed", "scores"), SCORE_AGAIN)
        runs[line["method"], line["seed"]] = ShiftedRun(line["method"], line["seed"], line["scores"])
    for own in sorted((folder / "runs").glob("*/shift.json")):
        config, scores = Config.load(own.parent), read_json(own, SCORE_AGAIN)
        runs[config.method, config.seed] = ShiftedRun(config.method, config.seed, scores)
    for run in runs.values():
        for name, scores in run.scores.items():
            check_keys(
                path, scores, ("accuracy", "nll", "ece", "ece_ts", "aurc", "coverage", "auroc", "fpr95"), SCORE_AGAIN
            )
            if name not in SHIFTS:
                raise CheckpointError(f"{path}: there is no shift {name!r}. {SCORE_AGAIN}")
    found = {name: [runs[key] for key in sorted(runs) if key[0] == name] for name in METHODS}
    return {name: own for name, own in found.items() if own}


def pack(folder: Path) -> None:
    """Writes all runs' scores into one file."""
    runs = [run._asdict() for own in load(folder).values() for run in own]
    if runs:
        write_lines(folder / LINES_FILE, runs)


def groups(runs: List[ShiftedRun]) -> Dict[str, List[str]]:
    """Shifts that are one column: the severities of a corruption. The open set's known queries are those in domain."""
    found: Dict[str, List[str]] = {}
    for name in [name for name in SHIFTS if name != OPEN]:
        kind, _, severity = name.rpartition(" ")
        found.setdefault(kind if severity.isdigit() else name, []).append(name)
    return {group: names for group, names in found.items() if all(name in runs[0].scores for name in names)}


def mean(runs: List[ShiftedRun], names: List[str], key: str) -> float:
    """Over runs and shifts; nan where one has no such score."""
    values = [run.scores[name][key] for run in runs for name in names]
    return float("nan") if None in values else float(np.mean(values))


def table(methods: Dict[str, List[ShiftedRun]]) -> str:
    """Accuracy, NLL, ECE and ECE after a temperature that was fitted in domain, and what is asked of doubt."""
    columns = groups(max(methods.values(), key=lambda runs: len(runs[0].scores)))
    every = [name for own in min(map(groups, methods.values()), key=lambda own: len(own)).values() for name in own]
    lines = [
        f"| method | seeds | {' | '.join(columns)} | AUROC, open set | FPR95 % | AURC | coverage % |",
        "|---" * (len(columns) + 6) + "|",
    ]
    for method, runs in methods.items():
        own, cells = groups(runs), []
        for group, names in columns.items():
            scores = [mean(runs, names, key) for key in ("accuracy", "nll", "ece", "ece_ts")] if group in own else []
            cells.append(
                f"{100 * scores[0]:.1f}, {scores[1]:.3f}, {100 * scores[2]:.1f}, {100 * scores[3]:.1f}"
                if scores
                else ""
            )
        auroc, fpr95 = (mean(runs, [OPEN], key) for key in ("auroc", "fpr95"))
        doubt = f"{auroc:.3f}", f"{100 * fpr95:.1f}", f"{mean(runs, every, 'aurc'):.3f}"
        covered = f"{100 * mean(runs, every, 'coverage'):.1f}"
        lines.append("| " + " | ".join([METHODS[method].title, str(len(runs)), *cells, *doubt, covered]) + " |")
    return "\n".join(lines)


def ratios(methods: Dict[str, List[ShiftedRun]]) -> str:
    """NIW's ECE over its baseline's, by shift."""
    found: Dict[str, Dict[str, float]] = {}
    for method, runs in methods.items():
        baseline = METHODS[method].baseline
        if baseline in methods:
            own = groups(runs)
            found[method] = {
                group: mean(runs, names, "ece") / mean(methods[baseline], names, "ece") for group, names in own.items()
            }
    if not found:
        return ""
    columns = list(max(found.values(), key=lambda own: len(list(own))))
    lines = [f"| NIW | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for method, by_group in found.items():
        cells = [f"{by_group[group]:.2f}" if group in by_group else "" for group in columns]
        lines.append("| " + " | ".join([METHODS[method].title, *cells]) + " |")
    return "\n".join(lines)


def plot(methods: Dict[str, List[ShiftedRun]], path: Path) -> None:
    """NLL and ECE by shift; a baseline has its NIW's colour, and is dashed."""
    require("matplotlib", "examples").use("Agg")
    pyplot = require("matplotlib.pyplot", "examples")
    figure, axes = pyplot.subplots(1, 2, figsize=(15, 5), layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(n for n in METHODS if METHODS[n].baseline is None)}
    places = {name: place for place, name in enumerate(name for name in SHIFTS if name != OPEN)}
    for method, runs in methods.items():
        spec = METHODS[method]
        colour = colours[spec.baseline] if spec.baseline in colours else colours.get(method, "k")
        style = {"color": colour, "ls": "-" if spec.baseline else "--", "marker": "." if spec.baseline else "x"}
        for ax, key, factor in zip(axes, ("nll", "ece"), (1, 100)):
            for names in groups(runs).values():  # a line goes through the severities of one corruption
                ax.plot([places[n] for n in names], [factor * mean(runs, [n], key) for n in names], **style)
            ax.plot([], [], label=spec.title, **style)
    for ax, label in zip(axes, ("NLL", "ECE, %")):
        ax.set_ylabel(label)
        ax.set_xticks(list(places.values()), list(places), rotation=60)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def section(folder: Path) -> List[str]:
    """Paragraphs of the report, none where no run was scored under shift."""
    methods = load(folder)
    if not methods:
        return []
    plot(methods, folder / PLOT_FILE)
    own = ratios(methods)
    of_images = any(len(groups(runs)) > 1 for runs in methods.values())
    text = (
        f"The same models, without further training, on {TASKS} tasks of each kind: accuracy %, NLL, ECE %, and ECE % "
        f"after the temperature that was fitted in domain. {OF_IMAGES if of_images else ''}AUROC, FPR95: unknown "
        "queries, told apart by the largest probability. AURC: the error among what is answered, over how much "
        "is, mean over the columns that all have, lower is better. Coverage: of prediction sets at "
        f"{100 * LEVEL:.0f}%, fitted on validation tasks."
    )
    found = ["## Under shift" if of_images else "## Out of scope", text, table(methods)]
    if own:
        found += ["ECE of NIW over that of its baseline:", own]
    return [*found, f"![NLL and ECE under shift]({PLOT_FILE})"]
