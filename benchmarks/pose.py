#!/usr/bin/env python3

"""
Few-shot pose estimation, the paper's Tables 6 and 7 on rendered furniture: MAML, a ridge head (C+R), CNP, CNP+BA, ANP
and functional contrastive learning, each without and with NIW, a mixture of NIWs, and two predictors without a network.

    python benchmarks/pose.py --tune --jobs 2            # search settings, on validation tasks: four for every row
    python benchmarks/pose.py --jobs 2                   # train and score every row, with three seeds
    python benchmarks/pose.py --columns azimuth --methods cr niw-cr
    python benchmarks/pose.py --augmentation none        # which small budgets are better off with
    python benchmarks/pose.py --report                   # tables and plots of what has been run
    python benchmarks/pose.py --quick                    # small images of simple shapes, in a minute or two

Columns are families of tasks: azimuth (grey, on black), rotation (colour, on patterns, quaternions) and position (an
object among others). Every row has the same encoder and the same batches of the same augmented tasks, and predicts the
same test tasks, of objects of training categories and of others. A run that was stopped resumes where it was; a
finished one is not run again. A column's finished runs are packed into its results.npz, from which the report can be
made again and which counts as done; folders under runs/ stay as they are.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from pose_estimation.columns import AUGMENTATIONS, COLUMNS, objects
from pose_estimation.page import report
from pose_estimation.rows import ROWS
from pose_estimation.runs import Job, execute, pack, packed
from pose_estimation.search import choose, is_tried, run_trial, settings_of
from tqdm import tqdm

from l2l_niw.errors import NIWError
from l2l_niw.utils._files import read_json

RESULTS = Path(__file__).parent / "results" / "pose"
QUICK_RESULTS = Path(tempfile.gettempdir()) / "l2l_niw_pose_quick"
QUICK = {"size": 32, "batches": 8, "meta_batch": 2, "validations": 2, "validation_tasks": 2, "test_tasks": 4}
QUICK |= {"shots": 5, "queries": 4, "primitives": True}


def column_of(name, args):
    """A column with the budget of the command line."""
    column = replace(COLUMNS[name], **QUICK) if args.quick else COLUMNS[name]
    column = column.augmented(args.augmentation)
    return column if args.batches is None else replace(column, batches=args.batches)


def job_of(column, method, seed, args):
    return Job(column, method, seed, settings_of(args.results, column, method))


def run_folder(column, method, seed, args):
    return args.results / column.name / "runs" / f"{method}-{seed}"


def is_done(column, method, seed, args):
    """Whether a run with these settings is scored, in its folder or packed."""
    wanted = json.loads(json.dumps(job_of(column, method, seed, args).config()))
    path = run_folder(column, method, seed, args) / "scores.json"
    if path.exists():
        return read_json(path, "Delete the run's folder.")["config"] == wanted
    found = packed(args.results / column.name)[0].get((method, seed))
    return found is not None and found.record["config"] == wanted


def jobs_of(args):
    """[(column's name, method, number of a setting or seed)] of what is not done yet."""
    jobs = []
    for name in args.columns:
        column = column_of(name, args)
        for method in args.methods:
            space = ROWS[method].space
            if args.tune:
                left = [i for i in range(len(space)) if not is_tried(args.results, column, method, i)]
            else:
                seeds = args.seeds if space else args.seeds[:1]
                left = [seed for seed in seeds if not is_done(column, method, seed, args)]
            jobs += [(name, method, number) for number in left]
    return jobs


def work(name, method, number, args):
    column = column_of(name, args)
    if args.tune:
        run_trial(args.results, column, method, number, args.data)
    else:
        execute(job_of(column, method, number, args), run_folder(column, method, number, args), args.data)


def in_processes(jobs, args):
    """Several runs at a time, each in a process with one thread. One that fails does not stop the others."""

    def start(job):
        command = [sys.executable, __file__, "--job", "/".join(map(str, job)), "--results", str(args.results)]
        for name, value in (("--data", args.data), ("--batches", args.batches)):
            command += [name, str(value)] if value is not None else []
        command += ["--augmentation", args.augmentation]
        command += [flag for flag, given in (("--tune", args.tune), ("--quick", args.quick)) if given]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return f"{' '.join(command)} failed:\n{done.stderr}" if done.returncode else None

    with ThreadPoolExecutor(args.jobs) as pool:
        failures = [f for f in tqdm(pool.map(start, jobs), total=len(jobs), desc="runs") if f is not None]
    if failures:
        raise NIWError("\n".join(failures))


def run_all(args):
    """Everything that is not done yet; then the search's choice, or each column's packed results."""
    jobs = jobs_of(args)
    if jobs:
        objects(args.data, args.quick)  # missing data are an error before any run starts
    try:
        if args.jobs > 1:
            in_processes(jobs, args)
        else:
            for job in jobs:
                work(*job, args)
    finally:
        for column in (column_of(name, args) for name in args.columns):
            if args.tune:
                choose(args.results, column, args.methods)
            elif any((args.results / column.name / "runs").glob("*/scores.json")):
                pack(args.results / column.name)


def parser():
    """The parser of the command line, whose help is the script's text."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices, what in (("columns", COLUMNS, "COLUMN"), ("methods", ROWS, "METHOD")):
        found.add_argument(f"--{name}", nargs="+", choices=list(choices), default=list(choices), metavar=what,
                           help=f"which of {', '.join(choices)}")  # fmt: skip
    found.add_argument("--seeds", type=int, nargs="+", help="of initial weights and training tasks: 0 1 2")
    found.add_argument("--tune", action="store_true", help="search settings instead")
    found.add_argument("--batches", type=int, help="of every training; by default the column's")
    found.add_argument("--augmentation", choices=list(AUGMENTATIONS), default="paper",
                       help="of training: as the paper has it, of images alone, or none; the latter two have folders "
                            "of their own")  # fmt: skip
    found.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    found.add_argument("--data", help="folder of the furniture's folder, or the variable L2L_NIW_DATA")
    found.add_argument("--results", type=Path, help="where results are written")
    found.add_argument("--report", action="store_true", help="only write tables and plots of what has been run")
    found.add_argument("--quick", action="store_true", help="try it out, with results in the system's temporary folder")
    found.add_argument("--job", help=argparse.SUPPRESS)
    return found


def main():
    args = parser().parse_args()
    args.results = args.results or (QUICK_RESULTS if args.quick else RESULTS)
    args.seeds = args.seeds or ([0] if args.quick else [0, 1, 2])
    torch.set_num_threads(1)
    if args.job:
        name, method, number = args.job.split("/")
        work(name, method, int(number), args)
        return
    if not args.report:
        run_all(args)
    if not args.tune:
        for name in args.columns:
            print(report(args.results / column_of(name, args).name))


if __name__ == "__main__":
    try:
        main()
    except NIWError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
