#!/usr/bin/env python3

"""
Sine-Line, the paper's regression: NIW beside RidgeNet, MAML, Reptile, PMAML, VAMPIRE, BMAML, ensembles and neural
processes, and the Bayes-optimal predictor.

    python benchmarks/sine_line.py --tune --jobs 2       # search settings, on validation tasks: four for every row
    python benchmarks/sine_line.py --jobs 2              # train and score every row, five seeds, on the same test tasks
    python benchmarks/sine_line.py --rows ridge niw-ridge --budget 2000
    python benchmarks/sine_line.py --report              # tables and plots of what has been run

Every row sees the same number of batches of the same tasks, and predicts the same test tasks. A run that was stopped
resumes where it was; a finished one is not run again, unless its budget or its settings have changed. Finished runs are
packed into results.jsonl, from which the report can be made again and which counts as done.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from regression.rows import BASELINES, BAYES, ROWS, TITLES
from regression.scoring import score, summary, tasks_of
from regression.training import TASKS, start_again, tensors_of, train
from tqdm import tqdm

from l2l_niw.data import BayesOptimal, SineLine
from l2l_niw.errors import NIWError
from l2l_niw.reports import pack, report
from l2l_niw.reports._packed import read_lines
from l2l_niw.reports.sine_line import load_runs
from l2l_niw.utils._files import read_json, write
from l2l_niw.utils._process import machine

RESULTS = Path(__file__).parent / "results" / "sine_line"
TUNING_SEED = 100


def settings_of(row, results):
    """What the search has chosen, or the first of the row's settings where there was none."""
    path = results / "settings.json"
    chosen = read_json(path, "Restore it from git, or search anew with --tune.") if path.exists() else {}
    return chosen.get(row, {}).get("settings", ROWS[row].space[0])


BUILT = {}


def build(row, settings, seed):
    """A method at its start, built once per process."""
    own = {key: value for key, value in settings.items() if key != "outer_lr"}
    torch.manual_seed(seed)
    fresh = ROWS[row].build(**own)
    return start_again(BUILT.setdefault((row, *own.items()), fresh), fresh)


def run(row, seed, budget, test_tasks, results):
    """Trains and scores one row with one seed, and writes what came out of it."""
    tasks, path = tasks_of("test", test_tasks), results / "runs" / f"{row}-{seed}.json"
    if row == BAYES:
        optimal, facts = BayesOptimal(SineLine()), {"seconds": 0.0, "parameters": 0, "curve": []}
        predict, settings = lambda t: optimal(t.x, t.y, t.x_query), {}
    else:
        settings = settings_of(row, results)
        method = build(row, settings, seed)
        checkpoint = results / "unfinished" / f"{row}-{seed}-{budget}.pt"
        curve, seconds = train(method, settings["outer_lr"], budget, seed, checkpoint, f"{row}, seed {seed}")
        parameters = sum(tensor.numel() for tensor in tensors_of(method.groups(0.0)))
        predict, facts = method.predict, {"seconds": seconds, "parameters": parameters, "curve": curve}
    errors, nlls, levels = score(predict, tasks, seed, f"{row}, seed {seed}: test")
    (results / "tasks").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(results / "tasks" / f"{row}-{seed}.npz", mse=errors.numpy(), nll=nlls.numpy())
    found = {"row": row, "title": TITLES[row], "baseline": BASELINES[row], "seed": seed}
    found |= {"settings": settings, "budget": 0 if row == BAYES else budget}
    found |= {"batch": TASKS, "test_tasks": test_tasks, **summary(errors, nlls, levels), **facts, "machine": machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(found, indent=1) + "\n")


def tune(row, index, budget, results):
    """Trains one of a row's settings and scores it on validation tasks."""
    settings = ROWS[row].space[index]
    method = build(row, settings, TUNING_SEED)
    try:
        _, seconds = train(method, settings["outer_lr"], budget, TUNING_SEED, title=f"{row}: {settings}")
        found = {**summary(*score(method.predict, tasks_of("validation", 4000))), "seconds": seconds}
    except (RuntimeError, NIWError) as error:  # a setting that diverges is one of the row's trials too
        found = {"mse": None, "nll": None, "error": str(error).splitlines()[0]}
    found |= {"row": row, "index": index, "settings": settings, "budget": budget}
    with (results / "tuning.jsonl").open("a") as file:
        file.write(json.dumps({k: v for k, v in found.items() if k != "reliability"}) + "\n")


def choose(results):
    """Writes the settings with the lowest validation error of every row whose search is done."""
    lines, chosen = read_lines(results / "tuning.jsonl"), {}
    for row in ROWS:
        trials = {trial["index"]: trial for trial in lines if trial["row"] == row}
        if len(trials) == len(ROWS[row].space):
            finished = [trial for trial in trials.values() if trial["mse"] is not None]
            if not finished:
                raise RuntimeError(f"every setting of {row} diverged: change its space in rows.py, and its trials here")
            best = min(finished, key=lambda trial: trial["mse"])
            chosen[row] = {key: best[key] for key in ("settings", "mse", "nll", "budget")}
    (results / "settings.json").write_text(json.dumps(chosen, indent=1))


def is_done(kind, row, number, args):
    if kind == "tune":
        return any(t["row"] == row and t["index"] == number for t in read_lines(args.results / "tuning.jsonl"))
    found = load_runs(args.results).get((row, number))
    if found is None:
        return False
    if row == BAYES:
        return found["test_tasks"] == args.test_tasks
    wanted = (args.budget, args.test_tasks, settings_of(row, args.results))
    return (found["budget"], found["test_tasks"], found.get("settings")) == wanted


def jobs_of(args):
    """[(kind, row, numbers of its settings or seeds that are not done yet)]."""
    kind, jobs = "tune" if args.tune else "run", []
    for row in args.rows:
        if row == BAYES:
            numbers = [] if args.tune else args.seeds[:1]
        else:
            numbers = range(len(ROWS[row].space)) if args.tune else args.seeds
        if numbers := [number for number in numbers if not is_done(kind, row, number, args)]:
            jobs.append((kind, row, numbers))
    return jobs


def work(kind, row, numbers, args):
    for number in numbers:
        if kind == "tune":
            tune(row, number, args.trial_budget, args.results)
        else:
            run(row, number, args.budget, args.test_tasks, args.results)


def in_processes(jobs, args):
    """Several rows at a time, each in a process with one thread. One that fails does not stop the others."""

    def start(job):
        kind, row, numbers = job
        command = [sys.executable, __file__, "--job", f"{kind}/{row}/{','.join(map(str, numbers))}"]
        for name in ("budget", "trial_budget", "test_tasks", "results"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return f"{' '.join(command)} failed:\n{done.stderr}" if done.returncode else None

    with ThreadPoolExecutor(args.jobs) as pool:
        failures = [f for f in tqdm(pool.map(start, jobs), total=len(jobs), desc="rows") if f is not None]
    if failures:
        raise RuntimeError("\n".join(failures))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [BAYES, *ROWS]
    parser.add_argument("--rows", nargs="+", choices=choices, default=choices, metavar="ROW",
                        help=f"which of {', '.join(choices)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)), help="of initial weights and tasks")
    parser.add_argument("--budget", type=int, default=5000, help=f"batches of {TASKS} tasks, for every row alike")
    parser.add_argument("--test-tasks", type=int, default=20_000, help="which all rows are scored on")
    parser.add_argument("--tune", action="store_true", help="search settings instead")
    parser.add_argument("--trial-budget", type=int, default=1500, help="batches of a trial of the search")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, each on one thread")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--report", action="store_true", help="only write tables and plots of what has been run")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    if args.job:
        torch.set_num_threads(1)
        kind, row, numbers = args.job.split("/")
        work(kind, row, [int(number) for number in numbers.split(",")], args)
        return
    if not args.report:
        jobs = jobs_of(args)
        if args.jobs > 1:
            in_processes(jobs, args)
        else:
            for job in jobs:
                work(*job, args)
        if args.tune:
            choose(args.results)
            return
        pack(args.results)
    print(report(args.results))


if __name__ == "__main__":
    try:
        main()
    except NIWError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
