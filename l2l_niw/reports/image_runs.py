"""Runs of a comparison of image classifiers, from their folders or from the file that they were packed into."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from l2l_niw.errors import ArgumentError, CheckpointError
from l2l_niw.metrics.calibration import BINS
from l2l_niw.reports._packed import ARRAYS_FILE, REMEDY, check_keys, check_numbers, read_arrays, write_arrays
from l2l_niw.utils._files import read_json
from l2l_niw.vision.config import SHARED_OPTIONS, Config
from l2l_niw.vision.methods import METHOD_OPTIONS, METHODS
from l2l_niw.vision.runs import read_log

METRICS = ("accuracy", "ece", "ece_all", "nll", "brier", "seconds", "memory")
COLUMNS = ("iteration", "validation_accuracy", "validation_nll")
ARRAYS = ("accuracy", "nll", "bounds", "confidence", "accuracy_by_bin", "counts")
TEST_AGAIN, TRAIN_AGAIN = "Test the run anew.", "Train and test the run anew."


class Run(NamedTuple):
    """One method with one seed. `tasks` has every test task's own values, where that file is at hand."""

    path: Path
    config: Config
    metrics: Dict[str, Any]
    log: List[Dict[str, float]]
    tasks: Optional[Dict[str, np.ndarray]]


def load(folder: Path) -> Dict[str, List[Run]]:
    """{method: its runs, by seed}, in the order of `METHODS`. A run's folder wins over what was packed of it."""
    runs = [load_run(path.parent) for path in sorted((folder / "runs").glob("*/metrics.json"))]
    new = {(run.config.method, run.config.seed) for run in runs}
    runs += [run for run in load_packed(folder) if (run.config.method, run.config.seed) not in new]
    runs.sort(key=lambda run: run.config.seed)
    methods = {name: [run for run in runs if run.config.method == name] for name in METHODS}
    methods = {name: own for name, own in methods.items() if own}
    check_equal([run for own in methods.values() for run in own], SHARED_OPTIONS)
    for own in methods.values():
        check_equal(own, METHOD_OPTIONS)
        for one, other in zip(own, own[1:]):
            if one.config.seed == other.config.seed:
                raise ArgumentError(f"{one.path} and {other.path} are of the same seed. Move one of them away.")
    return methods


def load_run(folder: Path) -> Run:
    """A tested run from its folder."""
    metrics, tasks, found = folder / "metrics.json", folder / "tasks.npz", None
    config = Config.load(folder)
    check_method(folder / "config.json", config)
    scores = read_json(metrics, TEST_AGAIN)
    check_metrics(metrics, scores, TEST_AGAIN)
    if not (folder / "log.csv").exists():
        raise CheckpointError(f"{folder} has scores, but no log.csv. {TRAIN_AGAIN}")
    log = read_log(folder)
    check_log(folder / "log.csv", log, config, TRAIN_AGAIN)
    if tasks.exists():
        found = read_arrays(tasks, ARRAYS, TEST_AGAIN)
        check_tasks(tasks, found, config, TEST_AGAIN)
    return Run(folder, config, scores, log, found)


def load_packed(folder: Path) -> List[Run]:
    """All runs of a comparison's results.npz, none where there is no such file."""
    path = folder / ARRAYS_FILE
    if not path.exists():
        return []
    arrays = read_arrays(path, ("runs", *ARRAYS))
    try:
        records = json.loads(str(arrays.pop("runs")))
        configs = [Config(**record["config"]) for record in records]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} holds no packed runs: {error}. {REMEDY}") from error
    if not configs or any(array.shape[:1] != (len(configs),) for array in arrays.values()):
        raise CheckpointError(f"{path} does not have the same runs in all of its arrays. {REMEDY}")
    runs = []
    for i, (config, record) in enumerate(zip(configs, records)):
        own, tasks = path / f"{config.method}-{config.seed}", {name: array[i] for name, array in arrays.items()}
        check_keys(own, record, ("metrics", "log"), REMEDY)
        check_method(own, config)
        check_metrics(own, record["metrics"], REMEDY)
        check_log(own, record["log"], config, REMEDY)
        check_tasks(own, tasks, config, REMEDY)
        runs.append(Run(own, config, record["metrics"], record["log"], tasks))
    return runs


def pack(folder: Path) -> None:
    """Writes a comparison's results.npz: everything that its report needs of all runs, those packed before included."""
    runs = [run for own in load(folder).values() for run in own]
    for run in runs:
        if run.tasks is None:
            raise CheckpointError(f"{run.path} cannot be packed without its tasks.npz. {TEST_AGAIN}")
    records = [{"config": asdict(run.config), "metrics": run.metrics, "log": run.log} for run in runs]
    arrays = {name: np.stack([run.tasks[name] for run in runs if run.tasks is not None]) for name in ARRAYS}
    write_arrays(folder / ARRAYS_FILE, {"runs": np.array(json.dumps(records)), **arrays})


def packed_configs(folder: Path, config: Config) -> List[Config]:
    """Of the runs that were packed, which need not be run again; an error where they and `config` are no one table."""
    found = [run.config for run in load_packed(folder)]
    for other in found:
        for key in SHARED_OPTIONS:
            one, another = getattr(other, key), getattr(config, key)
            if one != another:
                raise ArgumentError(
                    f"{folder / ARRAYS_FILE} is of runs with {key} = {one!r}, not {another!r}. Choose another "
                    "folder, or move it away."
                )
    return found


def check_method(path: Path, config: Config) -> None:
    """Raises a `CheckpointError` unless the run's method is one of `METHODS`."""
    if config.method not in METHODS:
        raise CheckpointError(f"{path}: there is no method {config.method!r}. Move the run away.")


def check_metrics(path: Path, metrics: Any, remedy: str) -> None:
    """Raises a `CheckpointError` unless all of a run's scores are numbers; `ece_ts` may be None."""
    check_numbers(path, metrics, METRICS, remedy)
    check_keys(path, metrics, ["ece_ts"], remedy)
    if metrics["ece_ts"] is not None:  # where there was no best temperature
        check_numbers(path, metrics, ["ece_ts"], remedy)


def check_log(path: Path, log: Any, config: Config, remedy: str) -> None:
    """Raises a `CheckpointError` unless a run's log has validation rounds up to its last iteration."""
    if not isinstance(log, list) or not log:
        raise CheckpointError(f"{path} has no validation rounds. {remedy}")
    for line in log:
        check_numbers(path, line, COLUMNS, remedy)
    if log[-1]["iteration"] != config.iterations:
        raise CheckpointError(f"{path} ends at iteration {log[-1]['iteration']:g} of {config.iterations}. {remedy}")


def check_tasks(path: Path, tasks: Dict[str, np.ndarray], config: Config, remedy: str) -> None:
    """Raises a `CheckpointError` unless a run's arrays have one number per test task, or per bin."""
    lengths = {**dict.fromkeys(ARRAYS, BINS), "bounds": BINS + 1}
    lengths.update(dict.fromkeys(("accuracy", "nll"), config.test_tasks))
    for name, length in lengths.items():
        if tasks[name].shape != (length,) or tasks[name].dtype.kind not in "fiu":
            raise CheckpointError(f"{path}: {name} must be {length} numbers. {remedy}")


def check_equal(runs: List[Run], keys: Sequence[str]) -> None:
    """What is one table must have had the same tasks and the same budget, and what is one row the same settings."""
    first = runs[0]
    for run in runs[1:]:
        for key in keys:
            one, other = getattr(first.config, key), getattr(run.config, key)
            if one != other:
                raise ArgumentError(
                    f"{first.path} and {run.path} cannot be one table: {key} is {one} of the first, but {other} of "
                    "the second. Move one of them away."
                )
        if [line["iteration"] for line in run.log] != [line["iteration"] for line in first.log]:
            raise CheckpointError(f"{first.path} and {run.path} have other validation rounds. {TRAIN_AGAIN}")
