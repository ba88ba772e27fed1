#!/usr/bin/env python3

"""
NIW beside MAML on Sine-Line: a table, and a page to look at. The quick version of `sine_line.py`.

    make demo                                   # two minutes on two cores
    python benchmarks/demo.py --budget 500      # less of it

A task is a sine or a straight line, half of them each, seen at five points with noise. MAML takes one step, or five,
from a learned start. NIW, on the same plain network, learns eight directions that tasks differ along, and has a
posterior over them; a mixture of two of these finds out by itself that tasks are of two kinds. Beside them stands the
exact Bayesian answer: nobody can do better.
"""

import argparse
import multiprocessing
import os
import time
import webbrowser
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from regression.page import write_page
from regression.rows import BAYES, ROWS, TITLES
from regression.scoring import score, summary, tasks_of
from regression.training import TASKS, train

from l2l_niw.data import BayesOptimal, SineLine, Tasks
from l2l_niw.metrics import bootstrap, quantile

NIW_ROW, BASE_ROW, MIXTURE_ROW = "niw-plain-rank", "maml-plain-5", "niw-plain-mixture"
SHOWN_ROWS = {row: TITLES[row] for row in (BAYES, "maml-plain-1", BASE_ROW, NIW_ROW, MIXTURE_ROW)}
SETTINGS = {
    "maml-plain-1": {"lr": 0.03, "compile": False},
    BASE_ROW: {"lr": 0.03, "compile": False},
    NIW_ROW: {"kl_weight": 3.0},
    MIXTURE_ROW: {"kl_weight": 3.0},
}
SHOWN = 4  # tasks on the page
GRID = torch.linspace(-5, 5, 101)


def shown_tasks():
    """The first test tasks, with a fine grid as their query."""
    tasks = tasks_of("test", SHOWN)
    return Tasks(tasks.x, tasks.y, GRID.view(1, -1, 1).expand(SHOWN, -1, -1), None), tasks


def bands(predict):
    """Mean and 90% band of the shown tasks on the grid, each (tasks, grid)."""
    torch.manual_seed(0)
    prediction = predict(shown_tasks()[0])
    far = torch.full_like(prediction.mean, 60.0)
    parts = [prediction.mean, *(quantile(prediction.cdf, level, -far, far) for level in (0.05, 0.95))]
    return torch.stack([part.squeeze(-1) for part in parts]).tolist()


@torch.no_grad()
def movement(method):
    """How far the tasks' posterior means are from m_0, layer by layer: root mean squares over weights and tasks."""
    means = method.episodes.posterior(tasks_of("test", 200).support).mean
    start = dict(method.niw.module.named_parameters())
    return {name: (mean - start[name]).square().mean().sqrt().item() for name, mean in means.items()}


@torch.no_grad()
def shares(method):
    """Each component's share of straight lines, of sines, and of every shown task."""
    tasks = tasks_of("test", 1000)
    found = method.episodes.posterior(tasks.support).responsibilities
    x, y = (torch.cat(pair, 1) for pair in ((tasks.x, tasks.x_query), (tasks.y, tasks.y_query)))
    design = torch.cat([x, torch.ones_like(x)], -1)
    residual = y - design @ torch.linalg.lstsq(design, y).solution
    straight = residual.square().mean((1, 2)).sqrt() < 1.5 * SineLine().noise
    kinds = {"straight lines": found[straight].mean(0), "sines": found[~straight].mean(0)}
    return {name: own.tolist() for name, own in (*kinds.items(), *((f"task {k + 1}", found[k]) for k in range(SHOWN)))}


def work(row, budget, test_tasks, seed, position):
    """Everything that the table and the page need of one row, as plain numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    curve, seconds, method = [], 0.0, None
    if row == BAYES:
        optimal = BayesOptimal(SineLine(), resolution=100)

        def predict(tasks):
            return optimal(tasks.x, tasks.y, tasks.x_query)
    else:
        method = ROWS[row].build(**SETTINGS[row])
        curve, seconds = train(method, 0.004, budget, seed, title=f"{TITLES[row]:>12}", position=position)
        predict = method.predict
    errors, nlls, levels = score(predict, tasks_of("test", test_tasks), position=position)
    return {
        **summary(errors, nlls, levels),
        "held": ((levels > 0.05) & (levels < 0.95)).double().mean().item(),
        "errors": errors,
        "nlls": nlls,
        "curve": curve,
        "seconds": seconds,
        "bands": bands(predict),
        "movement": movement(method) if row == NIW_ROW else None,
        "shares": shares(method) if row == MIXTURE_ROW else None,
    }


def run(budget, test_tasks, seed):
    """{row: its numbers}. The mixture, which takes longest, has one process; the others take turns in another."""
    rows = [MIXTURE_ROW, *(row for row in SHOWN_ROWS if row != MIXTURE_ROW)]
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(2, context) as pool:
        jobs = {row: pool.submit(work, row, budget, test_tasks, seed, int(row != MIXTURE_ROW)) for row in rows}
        return {row: job.result() for row, job in jobs.items()}


def table(found):
    """Rows of strings, a header first."""
    header = ["method", "MSE (95% interval)", "MSE / MAML's", "NLL", "90% bands hold", "training, s"]
    rows = [header]
    for row, title in SHOWN_ROWS.items():
        own, base = found[row], found[BASE_ROW]
        mse = bootstrap(own["errors"])
        rows.append([
            title,
            f"{mse.mean:.3f} ({mse.low:.3f} to {mse.high:.3f})",
            "" if row == BASE_ROW else f"{own['mse'] / base['mse']:.2f}",
            f"{own['nll']:.3f}",
            f"{100 * own['held']:.1f}%",
            f"{own['seconds']:.0f}" if row != BAYES else "",
        ])  # fmt: skip
    return rows


def main(budget=1500, test_tasks=2000, seed=0, out=Path("demo"), show=False):
    began = time.perf_counter()
    found = run(budget, test_tasks, seed)
    rows = table(found)
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())
    page = out / "index.html"
    note = f"{budget:,} batches of {TASKS} tasks each, scored on the same {test_tasks:,} new tasks; seed {seed}."
    write_page(page, rows, note, SHOWN_ROWS, found, shown_tasks()[1], GRID.tolist())
    print(f"\n{note}\nPage: {page.resolve()} ({time.perf_counter() - began:.0f} s in all)")
    if show:
        webbrowser.open(page.resolve().as_uri())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=1500, help=f"batches of {TASKS} tasks, for every method")
    parser.add_argument("--test-tasks", type=int, default=2000, help="new tasks that all are scored on")
    parser.add_argument("--seed", type=int, default=0, help="makes a run repeatable")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the page")
    parser.add_argument("--show", action="store_true", help="open the page in a browser")
    main(**vars(parser.parse_args()))
