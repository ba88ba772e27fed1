"""
What the few-shot benchmarks share: a search of the same size for every method, on validation tasks, then the table.

Every method has the same backbone, the same weights to start from, the same training tasks, as many of them, and a
search over four settings: learning rates, after a quarter of the training, or all of it for a head alone. NIW has
those of the same network without it, and with a head searches the width of its prior too, a mixture what its
probabilities are sharpened by; inner steps of heads, which have none without NIW, were set by hand. A run that was
stopped resumes where it was, and a finished one is not run again. A column's finished runs are packed into its
results.npz, from which its report can be made again and which counts as done; the folders under runs/ stay as they
are. Where settings have changed, the folder of a run with the old ones has to be moved away first.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch

from l2l_niw.errors import NIWError
from l2l_niw.metrics import calibration
from l2l_niw.reports import pack, report
from l2l_niw.reports._packed import ARRAYS_FILE
from l2l_niw.reports.image_runs import packed_configs
from l2l_niw.utils._files import read_json, write
from l2l_niw.vision import METHODS
from l2l_niw.vision.compare import compare, run_all
from l2l_niw.vision.runs import fitted_temperature, predictions, read_log, trained
from l2l_niw.vision.tasks import tasksets_of

TRIAL = 4  # a trial of the search has this part of the iterations, but that of a head alone, which is cheap, all
TUNING_SEED, TUNING_TASKS = 100, 200
FULL = "niw-full"  # has settings of its own
CHOSEN = ("prior_std", "sharpen")  # by the search of widths
WIDTHS = (0.25, 0.5, 1.0, 2.0)  # of the prior of heads under NIW, relative to what they are trained with
SEARCHED = [
    method for method, spec in METHODS.items() if method == FULL or spec.baseline is None and spec.settings_of is None
]  # learning rates
HEADS = [
    method
    for method, spec in METHODS.items()
    if spec.prior_std is not None and method != FULL and spec.settings_of is None
]  # widths


@dataclass(frozen=True)
class Benchmark:
    """
    A benchmark.

    * `columns` - The settings that all methods of a table share.
    * `results` - Its folder.
    * `outer` - Four learning rates of what has no inner one, and `two` of those of what has.
    * `alone` - Four of a head whose backbone is fixed, which bears larger ones.
    * `inner` - Two inner rates of each method that has one.
    * `full_widths` - Two of the prior of the last layer's full posterior.
    * `of_heads` - By column, settings of heads under NIW that are not the methods' own.
    * `methods` - Those of the benchmark.
    * `shifted` - Columns whose runs are scored under shift too.
    """

    columns: dict
    results: Path
    outer: tuple
    two: tuple
    alone: tuple
    inner: dict
    full_widths: tuple
    methods: tuple
    of_heads: dict = field(default_factory=dict)
    shifted: tuple = ()

    def space(self, method):
        """Four settings, whatever the method."""
        if method in self.inner:
            rates = self.alone[1:3] if METHODS[method].fixed else self.two
            return [{"lr": lr, "inner_lr": inner} for lr, inner in product(rates, self.inner[method])]
        if method == FULL:
            return [{"lr": lr, "prior_std": std} for lr, std in product(self.two, self.full_widths)]
        return [{"lr": lr} for lr in (self.alone if METHODS[method].fixed else self.outer)]

    def trials(self, column, method, results):
        """[(settings, config, folder)] of the search."""
        base = self.columns[column]
        iterations = base.iterations if METHODS[method].fixed else base.iterations // TRIAL
        base = replace(base, method=method, seed=TUNING_SEED, iterations=iterations, validations=1)
        base = replace(base, validation_tasks=min(TUNING_TASKS, base.test_tasks))
        folder, space = results / column / "search", self.space(method)
        names = ["-".join([method, *(f"{key}-{value:g}" for key, value in own.items())]) for own in space]
        return [(own, replace(base, **own), folder / name) for own, name in zip(space, names)]

    def settings_of(self, column, method, results, width=True):
        """What the searches have chosen: a method's learning rates, or its baseline's; the width of a head's prior."""
        found, wanted = read_object(results / column / "settings.json"), searches_of(method, width)
        for name in wanted:
            if name not in found:
                print(f"{column}: no settings were searched for {name}; {method} has defaults.")
        own = dict(self.of_heads.get(column, {})) if method in HEADS else {}
        for name in wanted:
            own.update(found.get(name, {}))
        return own

    def search(self, column, methods, data, jobs, results):
        """Runs all trials of methods without NIW."""
        everything = {method: self.trials(column, method, results) for method in methods if method in SEARCHED}
        failures = run_trials([trial[1:] for own in everything.values() for trial in own], data, jobs)
        for method, own in everything.items():
            lines = []
            for settings, _, folder in own:
                if folder in failures:  # a setting that diverges is one of the method's trials too
                    error = failures[folder].text.splitlines()[-1]
                    lines.append({**settings, "validation_nll": None, "error": error})
                else:
                    lines.append({**settings, **read_log(folder)[-1]})
            choose(column, method, [settings for settings, *_ in own], lines, results)

    def search_widths(self, column, methods, data, jobs, results):
        """
        Trains heads under NIW once, in full, and scores them with every width: cold chains hardly know of it, while
        predictions do, and networks that are not overconfident yet, after a part of the training, would want none.
        """
        base, configs = replace(self.columns[column], seed=TUNING_SEED, validations=1), {}
        for method in methods:
            if method in HEADS:
                own = self.settings_of(column, method, results, width=False)
                configs[method] = replace(base, method=method, **own)
        folders = {method: results / column / "search" / method for method in configs}
        failures = run_trials([(config, folders[method]) for method, config in configs.items()], data, jobs)
        if failures:
            raise NIWError("\n".join(failure.text for failure in failures.values()))
        for method, folder in folders.items():
            started = configs[method].prior_std or METHODS[method].prior_std
            lines = [{"prior_std": started * w, **score_width(folder, started * w, data)} for w in WIDTHS]
            choose(
                column, method, [{key: line[key] for key in CHOSEN if key in line} for line in lines], lines, results
            )

    def table(self, column, args):
        """Trains and tests every method with the settings that the searches have chosen, and packs the results."""
        config, folder = self.columns[column], args.results / column
        settings = {method: self.settings_of(column, method, args.results) for method in args.methods}
        done = packed_configs(folder, config)
        stages = ("train", "test", "shift") if column in self.shifted else ("train", "test")
        compare(config, folder, args.methods, args.seeds, args.data, args.jobs, settings, done, stages)
        pack(folder)

    def parser(self, doc):
        """The parser of a script's command line, whose help is the script's text."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--columns", nargs="+", choices=list(self.columns), default=list(self.columns),
                            metavar="COLUMN", help=f"which of {', '.join(self.columns)}")  # fmt: skip
        parser.add_argument("--methods", nargs="+", choices=self.methods, default=self.methods, metavar="METHOD",
                            help=f"which of {', '.join(self.methods)}")  # fmt: skip
        parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2],
                            help="of initial weights and training tasks")  # fmt: skip
        parser.add_argument("--tune", action="store_true", help="search settings instead")
        parser.add_argument("--data", help="folder of the data, or the variable L2L_NIW_DATA")
        parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
        parser.add_argument("--results", type=Path, default=self.results, help="where results are written")
        parser.add_argument("--report", action="store_true", help="only write tables and plots of what has been run")
        return parser

    def main(self, doc, prepare=None):
        """The command line. `prepare(results)` is called before anything is run."""
        parser = self.parser(doc)
        args = parser.parse_args()
        torch.set_num_threads(1)  # as runs have: with more, widths take ten times as long beside other processes
        unsearched = [method for method in args.methods if method not in (*SEARCHED, *HEADS)]
        if args.tune and len(unsearched) == len(args.methods):
            parser.error(f"--tune: {', '.join(unsearched)} has its baseline's settings, and no search of its own.")
        try:
            if prepare is not None and not args.report:
                prepare(args.results)
            for column in args.columns:
                self.column(column, args)
        except NIWError as error:
            sys.exit(f"{Path(sys.argv[0]).name}: {error}")

    def column(self, column, args):
        """Searches settings, or runs and reports."""
        if args.tune:
            self.search(column, args.methods, args.data, args.jobs, args.results)
            self.search_widths(column, args.methods, args.data, args.jobs, args.results)
            return
        if not args.report:
            self.table(column, args)
        folder = args.results / column
        if (folder / ARRAYS_FILE).exists() or any((folder / "runs").glob("*/metrics.json")):
            print(report(folder))
        else:
            print(f"{column}: nothing has been run yet under {args.results}.")


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


def score_width(folder, width, data):
    """A trained run on validation tasks, as if its prior had been of this width; of a mixture, as sharp as is best."""
    training = trained(folder)
    config = training.config
    training.method.module.scale_prior_std(width / config.prior_std)
    torch.manual_seed(TUNING_SEED)
    tasks, title = tasksets_of(config, data).validation, f"{config.method}, width {width:g}"
    found, labels = predictions(training.method, tasks, min(TUNING_TASKS, config.test_tasks), title)
    sharpened = {}
    if config.sharpen is not None:
        sharpened["sharpen"] = config.sharpen / (fitted_temperature(found, labels) or 1.0)
        found = found.pow(sharpened["sharpen"] / config.sharpen)
        found = found / found.sum(-1, keepdim=True)
    probabilities, y = found.flatten(0, 1), labels.flatten()
    scores = {"accuracy": calibration.accuracy, "nll": calibration.nll, "ece": calibration.ece}
    return {**sharpened, **{f"validation_{name}": score(probabilities, y) for name, score in scores.items()}}
