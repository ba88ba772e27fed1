"""Several methods and seeds on the same tasks, each run in a process of its own."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from l2l_niw.data.images import data_root
from l2l_niw.errors import ArgumentError, NIWError, require
from l2l_niw.utils._checks import check_number
from l2l_niw.vision.backbone import start_of
from l2l_niw.vision.config import COMMON, Config
from l2l_niw.vision.methods import METHODS, OWN, complete, trainable
from l2l_niw.vision.runs import read_log, tasksets_of

DIVERGED = 3  # what the command line exits with then


class Failure(NamedTuple):
    """What a run that failed has said, and whether it is the training that has diverged."""

    text: str
    diverged: bool


def is_done(config: Config, folder: Path, test: bool = True) -> bool:
    """Whether a folder holds this run, trained and, if asked for, tested. Another's is an error."""
    config.check(folder)
    log = read_log(folder)
    return (folder / "metrics.json").exists() if test else bool(log) and log[-1]["iteration"] == config.iterations


def arguments(config: Config) -> List[str]:
    """A config as the command line's options."""
    given = {name: value for name, value in asdict(config).items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def run_all(
    runs: Sequence[Tuple[Config, Path]], root: Union[str, Path, None] = None, jobs: int = 1, test: bool = True
) -> Dict[Path, Failure]:
    """
    **Description**

    Trains, and tests, runs in processes with one thread each. What is done already is not done again, and what was
    stopped goes on. Data that are missing, or too few for the tasks, are an error before any of them starts. A run that
    fails later does not stop the others: what it said is returned, by folder.

    **Arguments**

    * **runs** (sequence) - Configs and folders.
    * **root** (str, *optional*, default=None) - Folder of the data; what the variable L2L_NIW_DATA says by default.
    * **jobs** (int, *optional*, default=1) - Runs at a time.
    * **test** (bool, *optional*, default=True) - Whether they are tested too.
    """
    check_number("jobs", jobs, 1, whole=True)
    variables = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "L2L_NIW_DATA": str(data_root(root))}
    runs = [(complete(config), folder) for config, folder in runs]
    waiting = [(config, folder) for config, folder in runs if not is_done(config, folder, test)]

    def start(run: Tuple[Config, Path]) -> Optional[Failure]:
        config, folder = run
        for command in (["train", *arguments(config), "--out"], ["test"])[: 1 + test]:
            line = [sys.executable, "-W", "ignore", "-m", "l2l_niw", *command, str(folder)]
            done = subprocess.run(line, env={**os.environ, **variables}, capture_output=True, text=True)
            if done.returncode:
                text = f"{' '.join(line)} failed (exit code {done.returncode}):\n{done.stderr.strip()}"
                return Failure(text, done.returncode == DIVERGED)
        return None

    for config, _ in waiting:
        tasksets_of(config, root)
        if config.pretraining:
            start_of(config, root)  # here, or runs at the same time would each make it
    bar = require("tqdm", "examples").tqdm(total=len(runs), initial=len(runs) - len(waiting), desc="runs")
    failures = {}
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
) -> None:
    """
    **Description**

    Trains and tests methods with every seed, as `run_all` does, in the folder's runs/method-seed.

    **Arguments**

    * **config** (Config) - What all have in common.
    * **folder** (str) - Of the comparison.
    * **methods** (sequence, *optional*, default=None) - Of `METHODS`. Defaults to all; those with a fixed backbone only
        after a pretraining.
    * **seeds** (sequence) - Of initial weights and training tasks.
    * **root** (str, *optional*, default=None) - Folder of the data; what the variable L2L_NIW_DATA says by default.
    * **jobs** (int, *optional*, default=1) - Runs at a time.
    * **settings** (dict, *optional*, default=None) - A method's own values of the config: {method: {name: value}}.
    * **done** (sequence, *optional*, default=()) - Complete configs of runs whose results are kept elsewhere.
    """
    settings, methods = settings or {}, trainable(config) if methods is None else methods
    for name in (*methods, *settings):
        if name not in METHODS:
            raise ArgumentError(f"methods must be of {', '.join(METHODS)}; got {name!r}.")
        for key in settings.get(name, {}):
            if key not in OWN:
                raise ArgumentError(
                    f"settings of {name} may be {', '.join(OWN)}, since all else is common; got {key!r}."
                )
            if getattr(METHODS[name], key) is None:
                raise ArgumentError(f"settings of {name}: it has no {key}. Leave that out.")
    for key in OWN:
        if getattr(config, key) is not None and all(getattr(METHODS[name], key) is None for name in methods):
            raise ArgumentError(f"{key}: none of {', '.join(methods)} has it. Leave that out.")
    for name, given in (("seeds", seeds), ("methods", methods)):
        if len(set(given)) < len(given):
            raise ArgumentError(f"{name} must differ, got {list(given)}.")
    for path in sorted((Path(folder) / "runs").glob("*/config.json")):
        config.check(path.parent, COMMON)  # or there would be no table
    configs = [
        complete(replace(config, method=method, seed=seed, **settings.get(method, {})))
        for seed in seeds
        for method in methods
    ]
    configs = [c for c in configs if c not in done]
    if not configs:
        return
    failures = run_all([(c, Path(folder) / "runs" / f"{c.method}-{c.seed}") for c in configs], root, jobs)
    if failures:
        raise NIWError("\n".join(failure.text for failure in failures.values()))


def read_settings(path: Path) -> Dict[str, dict]:
    """Methods' own values from a JSON file: {method: {name: value}}."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"settings: {path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(own, dict) for own in found.values()):
        raise ArgumentError(f'settings: {path} must be like {{"niw": {{"inner_lr": 0.1}}}}.')
    return found
