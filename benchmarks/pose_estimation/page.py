"""A column's page: the table, differences with intervals, settings, and plots."""

import json

import numpy as np
import torch

from l2l_niw.errors import ArgumentError
from l2l_niw.metrics import bootstrap
from l2l_niw.reports._pages import page
from pose_estimation.columns import SPLITS, Column
from pose_estimation.pictures import draw_curves, draw_views
from pose_estimation.rows import ROWS
from pose_estimation.runs import load
from pose_estimation.scoring import SAMPLES

PICTURED = ("nearest", "maml", "niw-maml", "cr", "niw-cr", "niw-cr-rank", "anp", "niw-anp")
TITLES = {"vector": "azimuths", "quaternion": "rotations", "position": "positions among distractors"}


def report(folder):
    """Writes README.md and its plots into a column's folder, and returns the text."""
    runs, views = load(folder)
    if not runs:
        raise ArgumentError(f"{folder} has no results yet: run the benchmark without --report.")
    by_row = {}
    for (method, _), run in runs.items():
        by_row.setdefault(method, []).append(run)
    column = Column(**next(iter(runs.values())).record["config"]["column"])
    results = [table(column, by_row), LEGEND, differences(column, by_row), *plots(folder, column, by_row, views)]
    title = f"Few-shot pose estimation: {TITLES[column.kind]}"
    title += {"da": ", without task augmentation", "plain": ", without augmentation"}.get(suffix_of(column), "")
    return page(
        folder, title, [part for part in results if part], setup(column, by_row, (folder / "settings.json").exists())
    )


def lines_of(header, rows):
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def table(column, by_row):
    """Means over tasks and seeds."""
    names = [*column.space.errors, "NLL", "90% regions hold", "R-ECE"]
    keys = [*column.space.errors, "nll", "coverage", "r_ece"]
    digits = dict.fromkeys(column.space.errors, "{:.2f}") | {"nll": "{:.3f}", "coverage": "{:.1%}", "r_ece": "{:.3f}"}
    header = ["intra / cross", *names, "seeds", "minutes", "parameters"]
    rows = []
    for method, runs in by_row.items():
        cells = [ROWS[method].title]
        for key in keys:
            means = [np.mean([run.record["scores"][split][key] for run in runs]) for split in SPLITS]
            cells.append(" / ".join(map(digits[key].format, means)))
        minutes = np.mean([run.record["seconds"] for run in runs]) / 60
        parameters = runs[0].record["parameters"]
        rows.append([*cells, str(len(runs)), f"{minutes:.1f}", f"{parameters:,}"])
    return lines_of(header, rows)


LEGEND = f"""\
Means over test tasks and seeds. *intra* are new objects of training categories, *cross* objects of new categories.
NLL is that of the pose itself, in nats, on the circle, the sphere or the plane. A region of the highest density that
has 90% of the predictive should hold 90% of the targets; R-ECE is the mean deviation over 20 such levels, from the rank
of the target's density among those of {SAMPLES} samples. Minutes are of one training, on one thread."""


DIFFERENCES = """\
With NIW minus without, on the same tasks with the same seeds, and 95% intervals over both; bold where clear of 0."""
SETUP = """\
`python benchmarks/pose.py --columns {options}`. Views are {size} pixels wide, of {objects}; training has
{batches} batches of {meta_batch} tasks for every row, with {augmented}. A batch of training has 3
to {shots} shots, test tasks {shots}, and all tasks {queries} queries; {test_tasks} tasks of either test are the same
for all rows and seeds. All rows have the same convolutional encoder, and are trained on the queries' Gaussian negative
log-likelihood by Adam with a cosine schedule. Predictions are Gaussians, or mixtures of them, over what networks are
given; densities are per {density}, of directions by the projected normal."""
SEARCHED = """\
Every row had four settings searched on validation tasks, after a quarter of the training: the lowest error won."""
DETAILS = """\
C+R is Bayesian ridge regression, whose mean is the paper's ridge head with a learned regulariser. With NIW the
encoder's last layer and the head are random, in MAML's place and where a row says so all weights. Posteriors of heads
are inferred from the prior's mode, those in MAML's place by the inner steps of training, and predictions average ten
posterior samples; rows with rank have Gauss-Newton steps on the last layers and the linearised predictive, and the
mixture has an encoder per component. With FCL under NIW the contrastive penalty is that of the common network. The
nearest view's standard deviation is what the support's views are off when each is predicted from the nearest of the
others."""


def paired(runs, baselines, what, split):
    """Task by task, what the seeds that both have differ by: (seeds, tasks)."""
    own, other = ({run.name[1]: run for run in part} for part in (runs, baselines))
    seeds = [seed for seed in own if seed in other]

    def values(run):
        array = (
            run.arrays["errors"][SPLITS.index(split), 0] if what == "error" else run.arrays["nll"][SPLITS.index(split)]
        )
        return torch.as_tensor(array).double()

    return torch.stack([values(own[seed]) - values(other[seed]) for seed in seeds]) if seeds else None


def differences(column, by_row):
    """NIW minus the same head without it."""
    error, rows = next(iter(column.space.errors)), []
    for method, runs in by_row.items():
        baseline = ROWS[method].baseline
        if baseline not in by_row:
            continue
        found = [paired(runs, by_row[baseline], what, split) for what in ("error", "nll") for split in SPLITS]
        if found[0] is not None:
            rows.append([ROWS[method].title, ROWS[baseline].title, *(cell(bootstrap(values)) for values in found)])
    if not rows:
        return ""
    header = ["", "minus", *(f"{name}, {split}" for name in (error, "NLL") for split in SPLITS)]
    return f"{DIFFERENCES}\n\n{lines_of(header, rows)}"


def cell(interval):
    mark = "**" if interval.low > 0 or interval.high < 0 else ""
    return f"{mark}{interval.mean:+.2f}{mark} ({interval.low:+.2f} to {interval.high:+.2f})"


def plots(folder, column, by_row, views):
    """Writes the plots; paragraphs that show them."""
    parts = []
    chosen = {ROWS[method].title: by_row[method][0] for method in PICTURED if method in by_row}
    if chosen and views is not None:
        draw_views(folder / "views.png", column.kind, views, chosen)
        truth = "the truth is green, the predicted point red, and samples of the predictive orange"
        place = "" if column.kind == "position" else " On the compass around a view is its azimuth."
        parts.append(f"Views of two intra-category test tasks: {truth}.{place}\n\n![Views](views.png)")
    curves = {}
    for method, runs in by_row.items():
        logs = [run.record["log"] for run in runs if run.record["log"]]
        if logs:
            errors = np.mean([[line["error"] for line in log] for log in logs], 0)
            curves[method] = [line["batch"] for line in logs[0]], errors, ROWS[method].baseline
    if curves:
        draw_curves(folder / "validation.png", f"validation: {next(iter(column.space.errors))}", curves)
        parts.append("Validation rounds; rows with NIW are dashed.\n\n![Validation](validation.png)")
    return parts


def setup(column, by_row, is_searched):
    """How the results were made."""
    parts = [part for part in ("data", "task") if getattr(column, f"{part}_augmentation")]
    augmented = f"{' and '.join(parts)} augmentation, Gao et al.'s (2022)" if parts else "no augmentation"
    if column.kind == "quaternion":
        augmented += ", and domain randomisation"
    objects = "primitives" if column.primitives else "screened furniture"
    rows = [[ROWS[method].title, f"`{json.dumps(settings)}`"] for method, settings in chosen_settings(by_row)]
    machines = sorted({run.record["machine"] for runs in by_row.values() for run in runs})
    searched = SEARCHED if is_searched else "The settings were not searched."
    options = column.name.partition("-")[0]
    options += {"da": " --augmentation data", "plain": " --augmentation none"}.get(suffix_of(column), "")
    text = SETUP.format(
        **vars(column), options=options, augmented=augmented, objects=objects, density=column.space.density
    )
    text = "\n\n".join([text, searched, DETAILS, f"Machine: {'; '.join(machines)}."])
    return f"{text}\n\n{lines_of(['', 'settings'], rows)}" if rows else text


def suffix_of(column):
    """What augmentation is left out, by the folder's name."""
    return column.name.partition("-")[2]


def chosen_settings(by_row):
    return [(method, runs[0].record["config"]["settings"]) for method, runs in by_row.items() if ROWS[method].space]
