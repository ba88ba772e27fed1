#!/usr/bin/env python3

"""Draws docs/assets/method.png: tasks, Langevin chains, posteriors, predictions, and the way back to the prior."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Ellipse, FancyArrowPatch

OUT = Path(__file__).parents[1] / "assets" / "method.png"
BLUE, ORANGE, GREEN, GREY = "#3f51b5", "#e8710a", "#2e7d32", "#616161"


def curve(x):
    return 1.6 * np.sin(1.1 * x + 0.5)


def draw_task(axes, random):
    x, line = np.array([-3.6, -2.2, -0.4, 1.3, 2.4]), np.linspace(-5, 5, 100)
    y = curve(x) + 0.2 * random.standard_normal(5)
    axes.plot(line, curve(line), color=GREY, linewidth=1, linestyle=":")
    axes.plot(x, y, "o", color=GREY, markersize=5)
    axes.set(xlim=(-5, 5), ylim=(-4, 4), title="a task: a few\nlabelled examples")
    return x, y


def draw_chain(axes, random, start, end):
    steps = np.linspace(0, 1, 6)[:, None]
    path = start + (end - start) * (1 - (1 - steps) ** 2) + 0.09 * random.standard_normal((6, 2))
    path[0] = start
    axes.plot(*path.T, "-o", color=ORANGE, markersize=4, linewidth=1.5)
    axes.add_patch(Ellipse(start, 1.9, 1.3, fill=False, edgecolor=BLUE, linewidth=1.5))
    axes.plot(*start, "s", color=BLUE, markersize=6)
    axes.text(start[0] - 0.08, start[1] - 0.26, "$m_0$", color=BLUE, ha="center", fontsize=12)
    axes.set(xlim=(-1.2, 2.2), ylim=(-1.1, 1.7), title="Langevin chain: adapt(loss),\nas often as MAML")
    return path[-1]


def draw_posterior(axes, random, mean):
    for size in (0.5, 1.0):
        axes.add_patch(Ellipse(mean, size, 0.75 * size, color=ORANGE, alpha=0.25, linewidth=0))
    drawn = mean + random.standard_normal((6, 2)) * (0.2, 0.14)
    axes.plot(*drawn.T, "x", color=GREEN, markersize=7, markeredgewidth=1.8)
    axes.plot(*mean, "o", color=ORANGE, markersize=6)
    axes.text(mean[0], mean[1] - 0.62, r"$q_i = \mathcal{N}(m_i, V_i)$", color=ORANGE, ha="center", fontsize=12)
    axes.set(xlim=(-1.2, 2.2), ylim=(-1.1, 1.7), title="posterior samples:\nposterior()")


def draw_predictions(axes, random, x, y):
    line = np.linspace(-5, 5, 100)
    distance = 1.3 * np.exp(-2 * np.exp(-((line[:, None] - x) ** 2)).sum(1))  # small near the support
    bends = random.standard_normal((6, 3))
    networks = [curve(line) + distance * (0.9 * a + 0.7 * b * np.sin(line + c)) + 0.1 * a for a, b, c in bends]
    for network in networks:
        axes.plot(line, network, color=GREEN, linewidth=0.9, alpha=0.6)
    axes.plot(line, np.mean(networks, 0), color="black", linewidth=1.8)
    axes.plot(x, y, "o", color=GREY, markersize=5)
    axes.set(xlim=(-5, 5), ylim=(-4, 4), title="prediction: the average\nover networks, predict(x)")


def arrow(figure, start, end, color, bend=0.0):
    style = {"arrowstyle": "-|>", "mutation_scale": 16, "linewidth": 1.8, "color": color}
    figure.add_artist(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))


def main(out=OUT, seed=3):
    random = np.random.default_rng(seed)
    figure, axes = plt.subplots(1, 4, figsize=(12, 4.1))
    figure.subplots_adjust(left=0.02, right=0.98, top=0.86, bottom=0.33, wspace=0.28)
    x, y = draw_task(axes[0], random)
    end = draw_chain(axes[1], random, np.array([0.0, 0.0]), np.array([1.15, 0.75]))
    draw_posterior(axes[2], random, end)
    draw_predictions(axes[3], random, x, y)
    for ax in axes:
        ax.set_xticks([])
        ax.set_yticks([])
        ax.title.set_fontsize(11)
    boxes = [ax.get_position() for ax in axes]
    middle = (boxes[0].y0 + boxes[0].y1) / 2
    for left, right in zip(boxes, boxes[1:]):
        arrow(figure, (left.x1 + 0.004, middle), (right.x0 - 0.004, middle), GREY)
    label = {"ha": "center", "va": "center", "fontsize": 12}
    box = {"boxstyle": "round,pad=0.5", "facecolor": "white", "linewidth": 1.8}
    prior = "prior over the weights of a task\n" + r"$L_0 = (m_0, V_0, n_0)$"
    centre = (boxes[1].x0 + boxes[1].x1) / 2
    figure.text(centre, 0.12, prior, color=BLUE, bbox={**box, "edgecolor": BLUE}, **label)
    arrow(figure, (centre, 0.2), (centre, boxes[1].y0 - 0.005), BLUE)
    last = (boxes[3].x0 + boxes[3].x1) / 2
    gradient = "meta-gradient of query loss + kl_weight KL$(q_i\\,\\|\\,$prior$)$ / $n$:  backward()"
    figure.text((centre + last) / 2 + 0.1, 0.03, gradient, color=GREY, ha="center", va="center", fontsize=10.5)
    arrow(figure, (last, boxes[3].y0 - 0.01), (centre + 0.125, 0.13), GREY, bend=-0.2)
    figure.savefig(out, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
