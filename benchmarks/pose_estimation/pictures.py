"""Plots: validation rounds, and views with true and predicted poses and how sure the predictive is."""

import math

import numpy as np
import torch

from l2l_niw.errors import require
from pose_estimation.scoring import encoded

TASKS, QUERIES, DRAWN = 2, 3, 60  # tasks and views in the picture, samples of a predictive
VIEWS = ("images", "targets")  # the same of all runs


def shown(predict, taskset, space):
    """Of the first views of a few tasks: images and targets, points that are predicted, and samples."""
    torch.manual_seed(0)
    taskset.position = 0
    tasks = taskset.batch(TASKS)
    with torch.no_grad():
        found = predict(encoded(space, tasks))
        samples = space.decode(found.sample(DRAWN))[:, :, :QUERIES]
        points = space.decode(found.mean())[:, :QUERIES]
    images = (255 * tasks.x_query[:, :QUERIES]).round().byte()
    arrays = {"images": images, "targets": tasks.y_query[:, :QUERIES], "points": points, "samples": samples}
    return {name: array.numpy() if name == "images" else array.half().numpy() for name, array in arrays.items()}


def azimuths(kind, targets):
    """In radians, of (sin, cos) or of quaternions R_x(elevation) R_y(-azimuth), (...)."""
    targets = np.asarray(targets, float)
    if kind == "vector":
        return np.arctan2(targets[..., 0], targets[..., 1])
    return 2 * np.arctan2(-targets[..., 2], targets[..., 0])


def plots():
    """matplotlib's pyplot, without a display."""
    require("matplotlib", "examples").use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_views(path, kind, views, rows):
    """
    A line per method, {title: run}, a column per view. Positions are in the image, and directions on a compass around
    it: the truth in green, the point that is predicted in red, samples of the predictive in orange.
    """
    plt = plots()
    count = TASKS * QUERIES
    figure, axes = plt.subplots(len(rows), count, figsize=(1.7 * count, 1.85 * len(rows)), squeeze=False)
    images = views["images"].reshape(count, *views["images"].shape[2:])
    targets = views["targets"].reshape(count, -1)
    for line, (title, run) in zip(axes, rows.items()):
        points = run.arrays["points"].reshape(count, -1)
        samples = run.arrays["samples"].reshape(DRAWN, count, -1)
        line[0].set_ylabel(title, fontsize=8)
        for k, axis in enumerate(line):
            axis.imshow(images[k].transpose(1, 2, 0).squeeze(), cmap="gray", vmin=0, vmax=255)
            axis.set(xticks=[], yticks=[])
            (draw_positions if kind == "position" else draw_compass)(
                axis, kind, images.shape[-1], targets[k], points[k], samples[:, k]
            )
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_positions(axis, kind, size, target, point, samples):
    axis.plot(samples[:, 1], samples[:, 0], ".", color="tab:orange", ms=2, alpha=0.6)
    axis.plot(point[1], point[0], "+", color="tab:red", ms=9)
    axis.plot(target[1], target[0], "x", color="tab:green", ms=7)
    axis.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))


def draw_compass(axis, kind, size, target, point, samples):
    middle, radius = (size - 1) / 2, 0.56 * size
    spread, random = azimuths(kind, samples), np.random.default_rng(0)
    where = radius * (1 + 0.12 * random.uniform(size=len(spread)))
    axis.plot(
        middle + where * np.sin(spread), middle - where * np.cos(spread), ".", color="tab:orange", ms=2, alpha=0.6
    )
    for angle, colour in ((azimuths(kind, point), "tab:red"), (azimuths(kind, target), "tab:green")):
        ends = np.array([0.8, 1.1]) * radius
        axis.plot(middle + ends * math.sin(angle), middle - ends * math.cos(angle), color=colour, lw=2.5)
    margin = 0.72 * size
    axis.set(xlim=(middle - margin, middle + margin), ylim=(middle + margin, middle - margin))


def draw_curves(path, title, curves):
    """Validation rounds, {row: (batches, errors)}; rows with NIW are dashed, in the colour of those without."""
    plt = plots()
    figure, axis = plt.subplots(figsize=(7.5, 4))
    colours = {}
    for row, (batches, errors, baseline) in curves.items():
        colour = colours.setdefault(baseline or row, f"C{len(colours)}")
        axis.plot(batches, errors, "--" if baseline else "-", color=colour, label=row, lw=1.3)
    axis.set(xlabel="batches", ylabel=title)
    axis.legend(fontsize=6, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
