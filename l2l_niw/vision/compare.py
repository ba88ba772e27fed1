"""Several methods and seeds on the same tasks, each run in its own process."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from l2l_niw.data.images import data_root
from l2l_niw.errors import ArgumentError, CheckpointError, NIWError, require
from l2l_niw.utils._checks import check_number
from l2l_niw.utils._files import folder_of
from l2l_niw.vision.config import SHARED_OPTIONS, Config
from l2l_niw.vision.methods import METHOD_OPTIONS, METHODS, complete, trainable
from l2l_niw.vision.pretraining import pretrained
from l2l_niw.vision.runs import read_log
from l2l_niw.vision.tasks import tasksets_of

STAGES = {"train": "", "test": "metrics.json", "shift": "shift.json"}  # of a run, and what is there after it
DIVERGED = 3  # exit code of the command line when a training diverges


class Failure(NamedTuple):
    """The error output of a run that failed, and whether its training diverged."""

    text: str
    diverged: bool


def commands_left(config: Config, folder: Path, stages: Sequence[str] = ("train", "test")) -> List[str]:
    """
    **Description**

    Which of the stages a run still needs. A finished training whose log is missing or broken needs `train`, which then
    only writes the log again, from the checkpoint. A folder with another run is an error.

    **Arguments**

    * **config** (Config) - As `complete` returns it.
    * **folder** (Path) - Of the run.
    * **stages** (sequence, *optional*, default=('train', 'test')) - Of `STAGES`.
    """
    config.check(folder)
    try:
        log = read_log(folder)
    except CheckpointError:
        log = []
    trained = bool(log) and log[-1]["iteration"] == config.iterations
    left = [stage for stage in stages if stage != "train" and not (folder / STAGES[stage]).exists()]
    tested = (folder / STAGES["test"]).exists()
    if trained and (tested or "test" not in stages):
        return left
    return ["train", *left] if (folder / "checkpoint.pt").exists() else list(stages)


def arguments(config: Config) -> List[str]:
    """A config as options of the command line."""
    given = {name: value for name, value in asdict(config).items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def run_all(
    runs: Sequence[Tuple[Config, Path]],
    root: Union[str, Path, None] = None,
    jobs: int = 1,
    stages: Sequence[str] = ("train", "test"),
) -> Dict[Path, Failure]:
    """
    **Description**

    Trains and tests runs in processes with one thread each. What is finished is not run again, and what was stopped
    resumes. Data that are missing, or too few for the tasks, are an error before any run starts. A run that fails does
    not stop the others: its error is returned, by folder.

    **Arguments**

    * **runs** (sequence) - Configs and folders.
    * **root** (str, *optional*, default=None) - Folder of the data; the variable L2L_NIW_DATA by default.
    * **jobs** (int, *optional*, default=1) - Runs at a time.
    * **stages** (sequence, *optional*, default=('train', 'test')) - Of `STAGES`.
    """
    check_number("jobs", jobs, 1, whole=True)
    variables = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "L2L_NIW_DATA": str(data_root(root))}
    runs = [(complete(config), folder) for config, folder in runs]
    left = {folder: commands_left(config, folder, stages) for config, folder in runs}
    waiting = [(config, folder) for config, folder in runs if left[folder]]

    def start(run: Tuple[Config, Path]) -> Optional[Failure]:
        config, folder = run
        for command in left[folder]:
            options = [*arguments(config), "--out"] if command == "train" else []
            line = [sys.executable, "-W", "ignore", "-m", "l2l_niw", command, *options, str(folder)]
            done = subprocess.run(line, env={**os.environ, **variables}, capture_output=True, text=True)
            if done.returncode:
                text = f"{' '.join(line)} failed (exit code {done.returncode}):\n{done.stderr.strip()}"
                return Failure(text, done.returncode == DIVERGED)
        return None

    for config, _ in waiting:
        tasksets_of(config, root)
        for component in range(METHODS[config.method].components if config.pretraining else 0):
            pretrained(config, config.pretraining_seed(component), root)  # once, before runs start at the same time
    bar = require("tqdm", "examples").tqdm(total=len(runs), initial=len(runs) - len(waiting), desc="runs")
    failures: Dict[Path, Failure] = {}
    with bar, ThreadPoolExecutor(jobs) as pool:
        for failure, (_, folder) in zip(pool.map(start, waiting), waiting):
            if failure is not None:
                failures[folder] = failure
            bar.set_postfix_str(f"{folder.name} {'done' if failure is None else 'failed'}", refresh=False)
            bar.update()
    return failures


def compare(
    config: Config,
    folder: Union[str, Path],
    methods: Optional[Sequence[str]] = None,
    seeds: Sequence[int] = (0, 1, 2),
    root: Union[str, Path, None] = None,
    jobs: int = 1,
    settings: Optional[Dict[str, dict]] = None,
    done: Sequence[Config] = (),
    stages: Sequence[str] = ("train", "test"),
) -> None:
    """
    **Description**

    Trains and tests methods with every seed, as `run_all` does, in the subfolders runs/method-seed.

    **Arguments**

    * **config** (Config) - Settings of all runs.
    * **folder** (str) - Of the comparison.
    * **methods** (sequence, *optional*, default=None) - Names in `METHODS`. Defaults to all; those with a fixed
        backbone only with pretraining.
    * **seeds** (sequence, *optional*, default=(0, 1, 2)) - Seeds of initial weights and training tasks.
    * **root** (str, *optional*, default=None) - Folder of the data; the variable L2L_NIW_DATA by default.
    * **jobs** (int, *optional*, default=1) - Runs at a time.
    * **settings** (dict, *optional*, default=None) - Options of single methods: {method: {name: value}}.
    * **done** (sequence, *optional*, default=()) - Complete configs of runs whose results are kept elsewhere.
    * **stages** (sequence, *optional*, default=('train', 'test')) - Of `STAGES`.
    """
    folder = folder_of("folder", folder)
    settings, methods = settings or {}, trainable(config) if methods is None else methods
    for name in (*methods, *settings):
        if name not in METHODS:
            raise ArgumentError(f"methods must be of {', '.join(METHODS)}; got {name!r}.")
        for key in settings.get(name, {}):
            if key not in METHOD_OPTIONS:
                raise ArgumentError(
                    f"settings of {name} may be {', '.join(METHOD_OPTIONS)}, since all else is shared; got {key!r}."
                )
            if getattr(METHODS[name], key) is None:
                raise ArgumentError(f"settings of {name}: it has no {key}. Leave that out.")
    for key in METHOD_OPTIONS:
        if getattr(config, key) is not None and all(getattr(METHODS[name], key) is None for name in methods):
            raise ArgumentError(f"{key}: none of {', '.join(methods)} has it. Leave that out.")
    for name, given in (("seeds", seeds), ("methods", methods)):
        if len(set(given)) < len(given):
            raise ArgumentError(f"{name} must differ, got {list(given)}.")
    for path in sorted((folder / "runs").glob("*/config.json")):
        config.check(path.parent, SHARED_OPTIONS)  # or they would not be comparable
    configs = [
        complete(replace(config, method=method, seed=seed, **settings.get(method, {})))
        for seed in seeds
        for method in methods
    ]
    configs = [c for c in configs if c not in done]
    if not configs:
        return
    failures = run_all([(c, folder / "runs" / f"{c.method}-{c.seed}") for c in configs], root, jobs, stages)
    if failures:
        raise NIWError("\n".join(failure.text for failure in failures.values()))


def read_settings(path: Path) -> Dict[str, dict]:
    """Options of single methods from a JSON file: {method: {name: value}}."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"settings: {path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(own, dict) for own in found.values()):
        raise ArgumentError(f'settings: {path} must be like {{"niw": {{"inner_lr": 0.1}}}}.')
    return found
