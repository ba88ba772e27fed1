"""Folders of results as benchmarks leave them, with figures made up."""

import csv
import json
from dataclasses import asdict, replace

import numpy as np
from drawings import SMALL

from l2l_niw.vision.methods import complete

ROW = {
    "title": "RidgeNet", "baseline": None, "settings": {}, "budget": 10, "batch": 20, "test_tasks": 6, "r_ece": 0.1,
    "reliability": [0.4, 1.0], "seconds": 1.0, "parameters": 3, "curve": [2.0, 1.0], "machine": "here",
}  # fmt: skip


def write_image_run(comparison, method, seed=0, **change):
    """A tested run in a comparison's folder."""
    random = np.random.default_rng([seed, *method.encode()])
    config = complete(replace(SMALL, method=method, seed=seed, steps=None, inner_lr=None, samples=None, **change))
    folder = comparison / "runs" / f"{method}-{seed}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    with (folder / "log.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["iteration", "seconds", "loss", "accuracy", "validation_accuracy", "validation_nll"])
        writer.writerows([iteration, *random.random(5)] for iteration in (2, 4))
    names = ("accuracy", "ece", "ece_ts", "ece_all", "nll", "brier", "seconds", "memory")
    tasks = {name: random.random(config.test_tasks) for name in ("accuracy", "nll")}
    metrics = {**dict(zip(names, random.random(8))), **{name: values.mean() for name, values in tasks.items()}}
    (folder / "metrics.json").write_text(json.dumps({**metrics, "machine": "here"}))
    bins = {"confidence": random.random(20), "accuracy_by_bin": random.random(20), "counts": np.arange(20)}
    bins["confidence"][0] = np.nan  # of an empty bin
    np.savez_compressed(folder / "tasks.npz", bounds=np.linspace(0, 1, 21, dtype=np.float32), **bins, **tasks)
    return folder


def write_sine_line_run(results, row="ridge", seed=0, **change):
    """A run's own file, and its tasks' values."""
    random = np.random.default_rng([seed, *row.encode()])
    tasks = {name: random.random(6).astype(np.float32) for name in ("mse", "nll")}
    for name in ("runs", "tasks"):
        (results / name).mkdir(parents=True, exist_ok=True)
    scores = {name: float(values.mean()) for name, values in tasks.items()}
    path = results / "runs" / f"{row}-{seed}.json"
    path.write_text(json.dumps({**ROW, "row": row, "seed": seed, **scores, **change}))
    np.savez(results / "tasks" / f"{row}-{seed}.npz", **tasks)
    return path
