"""Several methods and seeds on the same tasks, each run in a process of its own."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Union

from l2l_niw.checks import check_number
from l2l_niw.data.images import data_root
from l2l_niw.errors import ArgumentError, NIWError, require
from l2l_niw.vision.config import Config
from l2l_niw.vision.methods import METHODS, complete


def run_folder(folder: Path, config: Config) -> Path:
    return folder / "runs" / f"{config.method}-{config.seed}"


def is_done(folder: Path, config: Config) -> bool:
    own = run_folder(folder, config)
    return (own / "metrics.json").exists() and Config.load(own) == config


def arguments(config: Config) -> List[str]:
    """A config as the command line's options."""
    given = {name: value for name, value in asdict(config).items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def compare(
    config: Config,
    folder: Union[str, Path],
    methods: Sequence[str] = tuple(METHODS),
    seeds: Sequence[int] = (0, 1, 2),
    root: Union[str, Path, None] = None,
    jobs: int = 1,
    settings: Optional[Dict[str, dict]] = None,
) -> None:
    """
    **Description**

    Trains and tests methods with every seed, in processes with one thread each. What is done already is not done again,
    and what was stopped goes on.

    **Arguments**

    * **config** (Config) - What all have in common.
    * **folder** (str) - Of the comparison; runs are in runs/method-seed.
    * **methods** (sequence) - Of `METHODS`.
    * **seeds** (sequence) - Of initial weights and training tasks.
    * **root** (str, *optional*, default=None) - Folder of the data; what the variable L2L_NIW_DATA says by default.
    * **jobs** (int, *optional*, default=1) - Runs at a time.
    * **settings** (dict, *optional*, default=None) - A method's own values of the config: {method: {name: value}}.
    """
    check_number("jobs", jobs, 1, whole=True)
    folder, root, settings = Path(folder), data_root(root), settings or {}
    unknown = [name for name in (*methods, *settings) if name not in METHODS]
    if unknown:
        raise ArgumentError(f"methods must be of {', '.join(METHODS)}; got {unknown[0]!r}.")
    configs = [
        complete(replace(config, method=method, seed=seed, **settings.get(method, {})))
        for seed in seeds
        for method in methods
    ]
    waiting = [c for c in configs if not is_done(folder, c)]

    def start(own: Config) -> None:
        for command in (["train", *arguments(own), "--out"], ["test"]):
            line = [sys.executable, "-W", "ignore", "-m", "l2l_niw", *command, str(run_folder(folder, own))]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "L2L_NIW_DATA": str(root)}
            done = subprocess.run(line, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise NIWError(f"{' '.join(line)} failed:\n{done.stderr}")

    with ThreadPoolExecutor(jobs) as pool:
        tqdm = require("tqdm", "examples").tqdm
        list(tqdm(pool.map(start, waiting), total=len(configs), initial=len(configs) - len(waiting), desc="runs"))


def read_settings(path: Path) -> Dict[str, dict]:
    """Methods' own values from a JSON file: {method: {name: value}}."""
    if not path.exists():
        raise ArgumentError(f"settings: there is no file {path}.")
    return json.loads(path.read_text())
