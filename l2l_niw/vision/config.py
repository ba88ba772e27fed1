"""What a run is: everything that its result depends on."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Optional, Sequence

from l2l_niw.errors import ArgumentError, CheckpointError
from l2l_niw.utils._checks import check_number
from l2l_niw.utils._files import write

COMMON = (
    "dataset", "ways", "shots", "queries", "train_queries", "filters", "pretraining", "iterations", "meta_batch",
    "validations", "validation_tasks", "scaling_tasks", "test_tasks",
)  # what methods that are compared must not differ in  # fmt: skip


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """
    **Description**

    A run's settings, each with its explanation as the command line shows it. Those that are None are the method's own.
    """

    method: str = option("niw", "what to train")
    dataset: str = option("cifarfs", "omniglot, cifarfs, fc100, mini-imagenet or tiered-imagenet")
    ways: int = option(5, "classes a task")
    shots: int = option(1, "support images of a class")
    queries: int = option(15, "query images of a class, at validation and test")
    train_queries: int = option(5, "query images of a class, in training")
    filters: int = option(32, "of each of the four convolutions")
    pretraining: int = option(0, "epochs of telling all training classes apart, which the backbone has had before")
    iterations: int = option(2000, "batches of training")
    meta_batch: int = option(4, "tasks a batch")
    lr: Optional[float] = option(None, "Adam's learning rate, which ends at 0 on a cosine")
    inner_lr: Optional[float] = option(None, "learning rate of the inner steps, for methods that have them")
    steps: Optional[int] = option(None, "inner steps, for methods that have them")
    temperature: Optional[float] = option(None, "of NIW's chains")
    prior_std: Optional[float] = option(None, "by how much weights differ between tasks, as NIW begins to learn it")
    samples: Optional[int] = option(None, "networks of a prediction, for NIW")
    validations: int = option(10, "looks at the validation tasks on the way, one an iteration at most")
    validation_tasks: int = option(100, "tasks of such a look")
    scaling_tasks: int = option(300, "validation tasks that the temperature scaling is fitted on")
    test_tasks: int = option(1000, "tasks of the test")
    seed: int = option(0, "of initial weights and training tasks")

    def __post_init__(self) -> None:
        for name in ("shots", "queries", "train_queries", "filters", "meta_batch", "iterations"):
            check_number(name, getattr(self, name), 1, whole=True)
        for name in ("validations", "validation_tasks", "scaling_tasks"):
            check_number(name, getattr(self, name), 1, whole=True)
        for name in ("ways", "test_tasks"):  # there must be something to tell apart, and an interval needs two
            check_number(name, getattr(self, name), 2, whole=True)
        for name in ("seed", "pretraining"):
            check_number(name, getattr(self, name), 0, whole=True)
        for name in ("lr", "inner_lr", "prior_std"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, strict=True)
        for name in ("steps", "samples"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, whole=True)
        if self.temperature is not None:
            check_number("temperature", self.temperature, 0)

    def check(self, folder: Path, names: Optional[Sequence[str]] = None) -> None:
        """Raises where a folder holds a run with another config, as far as these names of it go."""
        if not (folder / "config.json").exists():
            return
        old = Config.load(folder)
        for name in [f.name for f in fields(self)] if names is None else names:
            if getattr(old, name) != getattr(self, name):
                raise CheckpointError(
                    f"{folder} holds a run with {name} = {getattr(old, name)!r}, not {getattr(self, name)!r}: choose "
                    "another folder, or the same settings to go on with it."
                )

    def save(self, folder: Path) -> None:
        """Writes it to a run's folder; one that is there already must be the same, or the run would be another's."""
        self.check(folder)
        if (folder / "config.json").exists():
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"{folder} cannot be a run's folder: {error}. Choose another.") from error
        write(folder / "config.json", json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Config":
        path = Path(folder) / "config.json"
        if not path.exists():
            raise ArgumentError(f"{folder} is no run's folder: it has no config.json.")
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read as a run's config: {error}") from error

    def filled(self, **defaults: Any) -> "Config":
        """With a method's own values where there is None, and without what the method does not have."""
        own = {name: None if value is None else getattr(self, name) for name, value in defaults.items()}
        return replace(self, **{name: defaults[name] if value is None else value for name, value in own.items()})
