"""One page to look at: plots as inline SVG, and nothing that is fetched from elsewhere."""

import html
import io
import string

import numpy as np

from l2l_niw.data import Tasks

TEMPLATE = string.Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>NIW on Sine-Line</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #ddd; white-space: nowrap; }
svg { max-width: 100%; height: auto; }
p { max-width: 46rem; }
</style>
<h1>NIW beside MAML on Sine-Line</h1>
<p>A task is a sine or a straight line, seen at five noisy points. How well, and how sure of itself, is each method
on the other points?</p>
<div class="scroll">$table</div>
<p>$note</p>
<h2>Predictions with 90% bands</h2>
<p>Black dots are the five support points, grey ones the targets that were not shown.</p>
$predictions
<h2>Which tasks each component took</h2>
<p>A mixture has two networks, and nobody told it that tasks are of two kinds. Each component's share of the tasks by
the support's evidence: of straight lines, of sines, and of the four tasks above.</p>
$shares
<h2>Calibration</h2>
<p>The fraction of targets below the predicted p-quantile, minus p: zero everywhere for honest predictions.</p>
$reliability
<h2>Training</h2>
$curves
<h2>Which layers adapt</h2>
<p>How far the weights of a task's posterior are from the common ones: root mean squares over weights and tasks.</p>
$movement
</html>
""")


def figure(width, height, rows=1, columns=1, **options):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **options)


def as_svg(drawn, picture=None):
    """The figure's text, and if a path is given a picture of it."""
    import matplotlib.pyplot as plt

    drawn.tight_layout()
    text = io.StringIO()
    drawn.savefig(text, format="svg")
    if picture is not None:
        drawn.savefig(picture, dpi=90)
    plt.close(drawn)
    return text.getvalue()[text.getvalue().index("<svg") :]


def draw_predictions(titles, found, tasks: Tasks, grid, picture):
    count = len(tasks.x)
    drawn, axes = figure(3 * count, 2.3 * len(titles), len(titles), count, sharex=True, sharey="col")
    for line, (row, title) in zip(axes, titles.items()):
        mean, low, high = np.array(found[row]["bands"])
        for k, axis in enumerate(line):
            axis.fill_between(grid, low[k], high[k], alpha=0.25, lw=0)
            axis.plot(grid, mean[k], lw=1.5)
            axis.plot(tasks.x_query[k], tasks.y_query[k], ".", color="#999", ms=3)
            axis.plot(tasks.x[k], tasks.y[k], "ko", ms=4)
            axis.set_title(f"{title}, task {k + 1}", fontsize=9)
    for k, axis in enumerate(axes[0]):
        targets = np.concatenate([tasks.y_query[k].numpy(), tasks.y[k].numpy()])
        margin = 0.6 * (targets.max() - targets.min())
        axis.set_ylim(targets.min() - margin, targets.max() + margin)
    return as_svg(drawn, picture)


def draw_reliability(titles, found):
    drawn, ((axis,),) = figure(6.5, 3.6)
    for row, title in titles.items():
        fractions = np.array(found[row]["reliability"])
        levels = np.arange(1, len(fractions) + 1) / len(fractions)
        axis.plot(levels, fractions - levels, label=f"{title}: R-ECE {found[row]['r_ece']:.4f}", marker=".")
    axis.axhline(0, color="k", lw=0.8)
    axis.set(xlabel="level p", ylabel="fraction below, minus p")
    axis.legend(fontsize=8)
    return as_svg(drawn)


def draw_curves(titles, found):
    drawn, ((axis,),) = figure(6.5, 3.6)
    for row, title in titles.items():
        curve = found[row]["curve"]
        if curve:
            axis.plot(np.linspace(0, 1, len(curve) + 1)[1:], curve, label=title)
        else:
            axis.axhline(found[row]["nll"], color="k", lw=0.8, ls="--", label=title)
    axis.set(xlabel="part of the budget", ylabel="negative log-likelihood of queries")
    axis.legend(fontsize=8)
    return as_svg(drawn)


def draw_movement(movement):
    drawn, ((axis,),) = figure(6.5, 0.5 + 0.3 * len(movement))
    names = list(movement)[::-1]
    axis.barh(names, [movement[name] for name in names])
    axis.set(xlabel="distance from the common weights")
    return as_svg(drawn)


def draw_shares(shares):
    """Stacked bars: of each kind of tasks, how much of them is each component's."""
    drawn, ((axis,),) = figure(6.5, 0.8 + 0.3 * len(shares))
    names, left = list(shares)[::-1], np.zeros(len(shares))
    for k, own in enumerate(np.array([shares[name] for name in names]).T):
        axis.barh(names, own, left=left, label=f"component {k + 1}")
        left += own
    axis.set(xlabel="share of the tasks", xlim=(0, 1))
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=len(names))
    return as_svg(drawn)


def write_page(path, rows, note, titles, found, tasks, grid):
    """A page of its own: the table, whose first row is a header, and the plots; the predictions as a picture too."""

    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    path.parent.mkdir(parents=True, exist_ok=True)
    movement = next(f["movement"] for f in found.values() if f["movement"])
    text = TEMPLATE.substitute(
        table="<table>" + line(rows[0], "th") + "".join(line(row, "td") for row in rows[1:]) + "</table>",
        note=html.escape(note),
        predictions=draw_predictions(titles, found, tasks, grid, path.with_name("predictions.png")),
        reliability=draw_reliability(titles, found),
        curves=draw_curves(titles, found),
        movement=draw_movement(movement),
        shares=draw_shares(next(f["shares"] for f in found.values() if f["shares"])),
    )
    path.write_text(text, encoding="utf8")
