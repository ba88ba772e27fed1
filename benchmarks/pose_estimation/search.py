"""A search of the same size for every method: four settings, after a quarter of the training, on validation tasks."""

import json
from dataclasses import replace

from l2l_niw.errors import LossError, NIWError
from l2l_niw.utils._files import make_folder, read_json, write
from pose_estimation.rows import ROWS
from pose_estimation.runs import Job, trained

TRIAL = 4  # a trial has this part of the batches
SEED = 100
REMEDY = "Delete it, and search anew with --tune."


def trial_job(column, method, index):
    """A trial of the search."""
    short = replace(column, batches=max(1, column.batches // TRIAL), validations=1)
    return Job(short, method, SEED, ROWS[method].space[index])


def trial_folder(results, column, method, index):
    return results / column.name / "search" / f"{method}-{index}"


def run_trial(results, column, method, index, root=None):
    """Trains one of a row's settings, and writes trial.json: what it came to on validation tasks."""
    folder, job = trial_folder(results, column, method, index), trial_job(column, method, index)
    try:
        *_, log, seconds = trained(job, folder, root)
        found = {"error": log[-1]["error"], "nll": log[-1]["nll"], "seconds": seconds}
    except LossError as error:  # a setting that diverges is one of the row's trials too
        found = {"error": None, "failure": str(error).splitlines()[0]}
    make_folder(folder)
    write(folder / "trial.json", json.dumps({"config": job.config(), **found}, indent=1) + "\n")


def is_tried(results, column, method, index):
    path = trial_folder(results, column, method, index) / "trial.json"
    wanted = json.loads(json.dumps(trial_job(column, method, index).config()))
    return path.exists() and read_json(path, REMEDY)["config"] == wanted


def choose(results, column, methods):
    """Keeps the settings with the lowest validation error of every row whose search is done, and all trials."""
    for method in methods:
        indices = range(len(ROWS[method].space))
        if not indices or not all(is_tried(results, column, method, index) for index in indices):
            continue
        trials = [read_json(trial_folder(results, column, method, i) / "trial.json", REMEDY) for i in indices]
        finished = [trial for trial in trials if trial["error"] is not None]
        if not finished:
            raise NIWError(f"{column.name}: every setting of {method} diverged. Change its space in rows.py.")
        best = min(finished, key=lambda trial: trial["error"])
        lines = [
            {**trial["config"]["settings"], **{k: v for k, v in trial.items() if k != "config"}} for trial in trials
        ]
        keep(results / column.name / "search.json", method, lines)
        keep(results / column.name / "settings.json", method, best["config"]["settings"])


def keep(path, method, value):
    """One more entry of a JSON file."""
    found = read_json(path, REMEDY) if path.exists() else {}
    write(path, json.dumps({**found, method: value}, indent=1) + "\n")


def settings_of(results, column, method):
    """What the search has chosen, or the first of the row's settings where there was none."""
    path = results / column.name / "settings.json"
    found = read_json(path, REMEDY) if path.exists() else {}
    return found.get(method, ROWS[method].space[0] if ROWS[method].space else {})
