"""A run: a folder with its config, its checkpoint and, in the end, its scores; and all of a column in one file."""

import io
import json
from dataclasses import dataclass, replace
from typing import Any, Dict

import numpy as np
import torch

from l2l_niw.errors import ArgumentError, CheckpointError
from l2l_niw.reports._packed import ARRAYS_FILE, check_keys, read_arrays, write_arrays
from l2l_niw.utils._files import locked, make_folder, read_json, write
from l2l_niw.utils._process import machine
from pose_estimation.columns import SPLITS, tasksets_of
from pose_estimation.pictures import VIEWS, shown
from pose_estimation.rows import ROWS
from pose_estimation.scoring import calibration, score
from pose_estimation.training import Training, train

ARRAYS = ("errors", "nll", "rank", "samples", "points")  # of a run
REMEDY = "Delete the run's folder, and run it again."
AWAY = "Move it away, or choose another folder with --results."
KEYS = ("config", "scores", "log", "seconds")


@dataclass(frozen=True)
class Job:
    """One run: a method with its settings, a seed of initial weights and training tasks, and what all share."""

    column: Any
    method: str
    seed: int
    settings: Dict[str, Any]

    def config(self):
        return {"column": self.column.facts(), "method": self.method, "seed": self.seed, "settings": self.settings}


@dataclass(frozen=True)
class Run:
    """A run's record, JSON, and its arrays, `ARRAYS`."""

    record: Dict[str, Any]
    arrays: Dict[str, np.ndarray]

    @property
    def name(self):
        return self.record["config"]["method"], self.record["config"]["seed"]


def started(job, folder, root=None):
    """A job's method at its start, and its tasks. What the folder's config says must be the same."""
    path, config = folder / "config.json", job.config()
    if path.exists() and read_json(path, REMEDY) != json.loads(json.dumps(config)):
        raise ArgumentError(f"{folder} is of a run with other settings. {AWAY}")
    make_folder(folder)
    write(path, json.dumps(config, indent=1) + "\n")
    torch.manual_seed(job.seed)
    options = {name: value for name, value in job.settings.items() if name != "lr"}
    return ROWS[job.method].build(job.column, **options), tasksets_of(job.column, job.seed, root)


def trained(job, folder, root=None):
    """Trains what is left of a run; its method, its tasks, its log, and seconds."""
    with locked(folder / ".lock"):
        method, tasksets = started(job, folder, root)
        if method.module is None:
            return method, tasksets, [], 0.0
        training = Training(method, job.column, job.settings["lr"])
        train(training, tasksets, folder / "checkpoint.pt", f"{job.column.name}, {job.method}, seed {job.seed}")
    return method, tasksets, training.log, training.seconds


def execute(job, folder, root=None):
    """Trains and scores a run, and writes tasks.npz and then scores.json, which says that all is there."""
    method, tasksets, log, seconds = trained(job, folder, root)
    parts = {"intra": tasksets.test, "cross": tasksets.cross}
    space, count = job.column.space, job.column.test_tasks
    found = [score(method.predict, parts[split], space, count, job.seed) for split in SPLITS]
    arrays = {name: np.stack([part[name] for part in found]) for name in ("errors", "nll", "rank")}
    arrays |= shown(method.predict, tasksets.test, space)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write(folder / "tasks.npz", content.getvalue())
    scores = {split: summary(space, part) for split, part in zip(SPLITS, found)}
    parameters = 0 if method.module is None else sum(p.numel() for p in method.module.parameters())
    record = {"config": job.config(), "scores": scores, "log": log, "seconds": seconds}
    record |= {"parameters": parameters, "machine": machine()}
    write(folder / "scores.json", json.dumps(record, indent=1) + "\n")


def summary(space, part):
    """Means over the tasks of a test."""
    errors = dict(zip(space.errors, part["errors"].mean(1).tolist()))
    return {**errors, "nll": float(part["nll"].mean()), **calibration(part["rank"])}


def read_run(folder):
    record = read_json(folder / "scores.json", REMEDY)
    check_keys(folder / "scores.json", record, KEYS, REMEDY)
    return Run(record, read_arrays(folder / "tasks.npz", (*ARRAYS, *VIEWS), REMEDY))


def packed(column_folder):
    """The runs that were packed, and the views that pictures show."""
    path = column_folder / ARRAYS_FILE
    if not path.exists():
        return {}, None
    arrays = read_arrays(path, ("runs", *ARRAYS, *VIEWS))
    try:
        records = json.loads(str(arrays["runs"]))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Restore it from git, or delete it.") from error
    runs = [Run(record, {name: arrays[name][i] for name in ARRAYS}) for i, record in enumerate(records)]
    return {run.name: run for run in runs}, {name: arrays[name] for name in VIEWS}


def load(column_folder):
    """All runs of a column by method and seed, from their folders or, where they have none, as packed; and views."""
    runs, views = packed(column_folder)
    for path in sorted((column_folder / "runs").glob("*/scores.json")):
        run = read_run(path.parent)
        views = {name: run.arrays[name] for name in VIEWS}
        runs[run.name] = replace(run, arrays={name: run.arrays[name] for name in ARRAYS})
    order = {name: place for place, name in enumerate(ROWS)}
    if unknown := {method for method, _ in runs} - set(order):
        raise CheckpointError(f"{column_folder} has runs of {', '.join(sorted(unknown))}, which is no row. {AWAY}")
    runs = dict(sorted(runs.items(), key=lambda pair: (order[pair[0][0]], pair[0][1])))
    columns = [run.record["config"]["column"] for run in runs.values()]
    for other in columns[1:]:
        differ = [key for key in columns[0] if other.get(key) != columns[0][key]]
        if differ:
            raise ArgumentError(f"{column_folder} has runs that differ in {', '.join(differ)}: no table. {AWAY}")
    return runs, views


def pack(column_folder):
    """Writes results.npz: everything that the report needs of all runs, those packed before included."""
    runs, views = load(column_folder)
    records = [run.record for run in runs.values()]
    arrays = {name: np.stack([run.arrays[name] for run in runs.values()]) for name in ARRAYS}
    write_arrays(column_folder / ARRAYS_FILE, {"runs": np.array(json.dumps(records)), **arrays, **views})
