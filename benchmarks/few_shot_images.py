#!/usr/bin/env python3

"""
Few-shot images: NIW beside MAML, ANIL, Reptile, ProtoNet, ridge, MetaOptNet, FEAT, MetaQDA and the fixed backbone alone
on CIFAR-FS, with calibration, in domain and under shift.

    python benchmarks/few_shot_images.py --data ROOT --tune --jobs 2     # search settings, on validation tasks
    python benchmarks/few_shot_images.py --data ROOT --jobs 2            # train and test every method, three seeds
    python benchmarks/few_shot_images.py --columns cifarfs-5-1 --methods protonet niw-ncc --data ROOT
    python benchmarks/few_shot_images.py --report                        # tables and plots of what has been run

Every method has the same backbone, the same four pretrainings, the same training tasks, as many of them, and a search
over four settings: learning rates, after a quarter of the training, or all of it for a head alone. NIW has those of the
same network without it, and with a head searches the width of its prior too, a mixture what its probabilities are
sharpened by; inner steps of heads, which have none without NIW, were set by hand. A run that was stopped resumes where
it was, and a finished one is not run again. A column's finished runs are packed into its results.npz, from which its
report can be made again and which counts as done; the folders under runs/ stay as they are. Where settings have
changed, the folder of a run with the old ones has to be moved away first. Pretrained weights are kept under
results/images/pretrained; without them the first run makes them, half an hour each.
"""

import argparse
import json
import shutil
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from l2l_niw.errors import NIWError
from l2l_niw.metrics import calibration
from l2l_niw.reports import pack, report
from l2l_niw.reports._packed import ARRAYS_FILE
from l2l_niw.reports.image_runs import packed_configs
from l2l_niw.utils._disk_cache import cache_path
from l2l_niw.utils._files import make_folder, read_json, write
from l2l_niw.vision import METHODS, Config
from l2l_niw.vision.compare import compare, run_all
from l2l_niw.vision.runs import fitted_temperature, predictions, read_log, tasksets_of, trained

RESULTS = Path(__file__).parent / "results" / "images"
BUDGET = {
    "filters": 64, "pretraining": 60, "backbones": 4, "batchnorm": "running", "precision": "bfloat16",
    "iterations": 1000, "validations": 5, "validation_tasks": 100,
}  # fmt: skip
COLUMNS = {
    "cifarfs-5-1": Config(dataset="cifarfs", ways=5, shots=1, queries=15, train_queries=5, **BUDGET),
    "cifarfs-5-5": Config(dataset="cifarfs", ways=5, shots=5, queries=15, train_queries=5, **BUDGET),
}
SHIFTED = ("cifarfs-5-1",)  # columns whose runs are scored under shift too
INNER_OF_HEADS = {"cifarfs-5-5": 0.001}  # under NIW: with five shots 0.01 costs accuracy on validation tasks
TRIAL = 4  # a trial of the search has this part of the iterations, but that of a head alone, which is cheap, all
TUNING_SEED, TUNING_TASKS = 100, 200
OUTER = (0.0002, 0.0005, 0.001, 0.002)  # learning rates of what has no inner one
HEAD_ALONE = (0.003, 0.006, 0.02, 0.06)  # of a head whose backbone is fixed, which bears larger ones
TWO = (0.0005, 0.001)
INNER = {**dict.fromkeys(("maml", "fomaml", "reptile"), (0.01, 0.03)), "anil": (0.1, 0.3), "linear": (0.1, 0.4)}
FULL, FULL_WIDTHS = "niw-full", (10.0, 40.0)  # has settings of its own; a tenth of these is its prior's width
CHOSEN = ("prior_std", "sharpen")  # by the search of widths
WIDTHS = (0.25, 0.5, 1.0, 2.0)  # of the prior of heads under NIW, relative to the method's default
SEARCHED = [
    method for method, spec in METHODS.items() if method == FULL or spec.baseline is None and spec.settings_of is None
]  # learning rates
HEADS = [
    method
    for method, spec in METHODS.items()
    if spec.prior_std is not None and method != FULL and spec.settings_of is None
]  # widths
ONLY = {"niw-ncc-rank": ("cifarfs-5-5",), "niw-qda-rank": ("cifarfs-5-5",)}  # one shot says nothing by leaving it out


def space(method):
    """Four settings, whatever the method."""
    if method in INNER:
        rates = HEAD_ALONE[1:3] if METHODS[method].fixed else TWO
        return [{"lr": lr, "inner_lr": inner} for lr, inner in product(rates, INNER[method])]
    if method == FULL:
        return [{"lr": lr, "prior_std": std} for lr, std in product(TWO, FULL_WIDTHS)]
    return [{"lr": lr} for lr in (HEAD_ALONE if METHODS[method].fixed else OUTER)]


def trials(column, method, results):
    """[(settings, config, folder)] of the search."""
    base = COLUMNS[column]
    iterations = base.iterations if METHODS[method].fixed else base.iterations // TRIAL
    base = replace(base, method=method, seed=TUNING_SEED, iterations=iterations, validations=1)
    base = replace(base, validation_tasks=TUNING_TASKS)
    folder = results / column / "search"
    names = ["-".join([method, *(f"{key}-{value:g}" for key, value in own.items())]) for own in space(method)]
    return [(own, replace(base, **own), folder / name) for own, name in zip(space(method), names)]


def read_settings(column, results):
    return read_object(results / column / "settings.json")


def read_object(path):
    return read_json(path, "Restore it from git, or search anew with --tune.") if path.exists() else {}


def choose(column, method, settings, lines, results):
    """Keeps the settings with the lowest validation NLL as the method's, and what all had."""
    finished = [i for i, line in enumerate(lines) if "error" not in line]
    if not finished:
        raise RuntimeError(f"every setting of {method} failed, the last one with: {lines[-1]['error']}")
    best = settings[min(finished, key=lambda i: lines[i]["validation_nll"])]
    for name, own in (("search.json", lines), ("settings.json", best)):
        path = results / column / name
        write(path, json.dumps({**read_object(path), method: own}, indent=1) + "\n")


def run_trials(runs, data, jobs):
    """What failed because it diverged, by folder; whatever else fails is an error."""
    failures = run_all(runs, data, jobs, stages=["train"])
    broken = [failure.text for failure in failures.values() if not failure.diverged]
    if broken:
        raise NIWError("\n".join(broken))
    return failures


def searches_of(method, width=True):
    """The methods whose searches a method's settings are from: its baseline, for learning rates, and itself."""
    spec = METHODS[method]
    if spec.settings_of is not None:
        return searches_of(spec.settings_of, width)
    if method in SEARCHED:
        return [method]
    return [*searches_of(spec.baseline, False), *([method] if width and method in HEADS else [])]


def settings_of(column, method, results, width=True):
    """What the searches have chosen: a method's learning rates, or its baseline's, and the width of a head's prior."""
    found, wanted = read_settings(column, results), searches_of(method, width)
    for name in wanted:
        if name not in found:
            print(f"{column}: no settings were searched for {name}; {method} has defaults.")
    spec, own = METHODS[method], {}
    if spec.inner_lr is not None and spec.prior_std is not None and column in INNER_OF_HEADS:
        own["inner_lr"] = INNER_OF_HEADS[column]
    for name in wanted:
        own.update(found.get(name, {}))
    return own


def search(column, methods, data, jobs, results):
    """Runs all trials of methods without NIW."""
    everything = {method: trials(column, method, results) for method in methods if method in SEARCHED}
    failures = run_trials([trial[1:] for own in everything.values() for trial in own], data, jobs)
    for method, own in everything.items():
        lines = []
        for settings, _, folder in own:
            if folder in failures:  # a setting that diverges is one of the method's trials too
                lines.append({**settings, "validation_nll": None, "error": failures[folder].text.splitlines()[-1]})
            else:
                lines.append({**settings, **read_log(folder)[-1]})
        choose(column, method, [settings for settings, *_ in own], lines, results)


def search_widths(column, methods, data, jobs, results):
    """
    Trains heads under NIW once, in full, and scores them with every width: cold chains hardly know of it, while
    predictions do, and networks that are not overconfident yet, after a part of the training, would want none.
    """
    base, configs = replace(COLUMNS[column], seed=TUNING_SEED, validations=1), {}
    for method in set(methods) & set(HEADS):
        configs[method] = replace(base, method=method, **settings_of(column, method, results, width=False))
    folders = {method: results / column / "search" / method for method in configs}
    failures = run_trials([(config, folders[method]) for method, config in configs.items()], data, jobs)
    if failures:
        raise NIWError("\n".join(failure.text for failure in failures.values()))
    for method, folder in folders.items():
        widths = [METHODS[method].prior_std * factor for factor in WIDTHS]
        lines = [{"prior_std": width, **score_width(folder, width, data)} for width in widths]
        choose(column, method, [{key: line[key] for key in CHOSEN if key in line} for line in lines], lines, results)


def score_width(folder, width, data):
    """A trained run on validation tasks, as if its prior had been of this width; of a mixture, as sharp as is best."""
    training = trained(folder)
    training.method.module.scale_prior_std(width / training.config.prior_std)
    torch.manual_seed(TUNING_SEED)
    tasks, title = tasksets_of(training.config, data).validation, f"{training.config.method}, width {width:g}"
    found, labels = predictions(training.method, tasks, TUNING_TASKS, title)
    sharpened = {}
    if training.config.sharpen is not None:
        sharpened["sharpen"] = training.config.sharpen / (fitted_temperature(found, labels) or 1.0)
        found = found.pow(sharpened["sharpen"] / training.config.sharpen)
        found = found / found.sum(-1, keepdim=True)
    probabilities, y = found.flatten(0, 1), labels.flatten()
    scores = {"accuracy": calibration.accuracy, "nll": calibration.nll, "ece": calibration.ece}
    return {**sharpened, **{f"validation_{name}": score(probabilities, y) for name, score in scores.items()}}


def table(column, args):
    """Trains and tests every method with the settings that the searches have chosen, and packs the results."""
    config, folder = COLUMNS[column], args.results / column
    methods = [method for method in args.methods if column in ONLY.get(method, (column,))]
    settings = {method: settings_of(column, method, args.results) for method in methods}
    done = packed_configs(folder, config)
    stages = ("train", "test", "shift") if column in SHIFTED else ("train", "test")
    compare(config, folder, methods, args.seeds, args.data, args.jobs, settings, done, stages)
    pack(folder)


def share_pretrained(results):
    """Puts pretrained weights that are kept beside the results into the cache, and new ones beside the results."""
    kept, cache = results / "pretrained", cache_path("").parent
    for source, target in ((kept, cache), (cache, kept)):
        for path in source.glob("cifarfs-conv4-64-60-*.safetensors"):
            if not (target / path.name).exists():
                make_folder(target)
                shutil.copy(path, target / path.name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS), metavar="COLUMN",
                        help=f"which of {', '.join(COLUMNS)}")  # fmt: skip
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD",
                        help=f"which of {', '.join(METHODS)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of initial weights and training tasks")
    parser.add_argument("--tune", action="store_true", help="search settings instead")
    parser.add_argument("--data", help="folder of the data, or the variable L2L_NIW_DATA")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--report", action="store_true", help="only write tables and plots of what has been run")
    args = parser.parse_args()
    unsearched = [method for method in args.methods if method not in (*SEARCHED, *HEADS)]
    if args.tune and len(unsearched) == len(args.methods):
        parser.error(f"--tune: {', '.join(unsearched)} has its baseline's settings, and no search of its own.")
    if not args.report:
        share_pretrained(args.results)
    for column in args.columns:
        if args.tune:
            search(column, args.methods, args.data, args.jobs, args.results)
            search_widths(column, args.methods, args.data, args.jobs, args.results)
            continue
        if not args.report:
            table(column, args)
        folder = args.results / column
        if (folder / ARRAYS_FILE).exists() or any((folder / "runs").glob("*/metrics.json")):
            print(report(folder))
        else:
            print(f"{column}: nothing has been run yet under {args.results}.")


if __name__ == "__main__":
    try:
        main()
    except NIWError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
