"""What a run is: everything that its result depends on."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Optional, Sequence

from l2l_niw.errors import ArgumentError, CheckpointError
from l2l_niw.utils._checks import check_number, check_seed
from l2l_niw.utils._files import make_folder, read_json, write

SHARED_OPTIONS = (
    "dataset", "ways", "shots", "queries", "train_queries", "backbone", "blocks", "filters", "pretraining", "backbones",
    "batchnorm", "precision", "iterations", "meta_batch", "validations", "validation_tasks", "scaling_tasks",
    "test_tasks",
)  # the same for all methods of a comparison  # fmt: skip

DATASETS = ("omniglot", "cifarfs", "fc100", "mini-imagenet", "tiered-imagenet", "clinc150", "clinc150-domains")
TEXTS = {"clinc150": False, "clinc150-domains": True}  # whether the classes of a task are of one domain
CHOICES = {
    "backbone": ("conv4", "dinov2", "minilm"), "batchnorm": ("batch", "running"), "precision": ("float32", "bfloat16"),
}  # fmt: skip


def option(default: Any, text: str) -> Any:
    """A field of `Config` with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """
    **Description**

    A run's settings, with their help texts on the command line. Where one is None the method's default is used.

    **Example**

    ~~~python
    config = Config(method='niw-ncc', dataset='omniglot', ways=20)
    ~~~
    """

    method: str = option("niw", "method to train")
    dataset: str = option("cifarfs", "images, or texts: CLINC150's intents, of all domains or of one domain per task")
    ways: int = option(5, "classes per task")
    shots: int = option(1, "support images per class")
    queries: int = option(15, "query images per class in validation and test tasks")
    train_queries: int = option(5, "query images per class in training tasks")
    backbone: str = option("conv4", "'conv4', or a pretrained transformer: 'dinov2' of images, 'minilm' of texts")
    blocks: int = option(1, "last blocks of a transformer that are trained; those before them are frozen")
    filters: int = option(32, "filters of each of the four convolutions of conv4")
    pretraining: int = option(0, "epochs of supervised pretraining of conv4 on all training classes")
    backbones: Optional[int] = option(None, "pretrainings that seeds take in turn; by default each seed has its own")
    batchnorm: str = option("batch", "BatchNorm's statistics: 'batch', as in MAML, or the pretraining's, 'running'")
    precision: str = option("float32", "what the backbone computes in: 'float32', or 'bfloat16', faster on new CPUs")
    iterations: int = option(2000, "meta-training iterations, one meta-batch each")
    meta_batch: int = option(4, "tasks per meta-batch")
    lr: Optional[float] = option(None, "Adam's learning rate, annealed to 0 on a cosine")
    inner_lr: Optional[float] = option(None, "learning rate of the inner steps")
    steps: Optional[int] = option(None, "inner steps per task")
    temperature: Optional[float] = option(None, "temperature of the inner SGLD steps, for NIW")
    prior_std: Optional[float] = option(None, "initial standard deviation of weights between tasks, for NIW")
    samples: Optional[int] = option(None, "posterior samples per prediction, for NIW")
    sharpen: Optional[float] = option(None, "power that the probabilities of a mixture are raised to")
    validations: int = option(10, "validation rounds during training, at most one per iteration")
    validation_tasks: int = option(100, "validation tasks per round")
    scaling_tasks: int = option(300, "validation tasks that temperature scaling is fitted on")
    test_tasks: int = option(1000, "test tasks")
    seed: int = option(0, "seed of initial weights and training tasks")

    def __post_init__(self) -> None:
        for name in ("shots", "queries", "train_queries", "filters", "blocks", "meta_batch", "iterations"):
            check_number(name, getattr(self, name), 1, whole=True)
        for name in ("validations", "validation_tasks", "scaling_tasks"):
            check_number(name, getattr(self, name), 1, whole=True)
        for name in ("ways", "test_tasks"):  # classification needs two classes, and an interval two tasks
            check_number(name, getattr(self, name), 2, whole=True)
        check_number("pretraining", self.pretraining, 0, whole=True)
        check_seed(self.seed)
        if self.backbones is not None:
            check_number("backbones", self.backbones, 1, whole=True)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}.")
        if (self.backbone == "minilm") != (self.dataset in TEXTS):
            raise ArgumentError(
                f"backbone is {self.backbone} and dataset {self.dataset}: minilm goes with {' and '.join(TEXTS)}, and "
                "with nothing else."
            )
        if self.backbone != "conv4" and self.pretraining:
            raise ArgumentError(f"pretraining is of conv4: {self.backbone} is pretrained. Leave it out.")
        if self.batchnorm == "running" and not self.pretraining:
            raise ArgumentError("batchnorm='running' takes the pretraining's statistics: give pretraining, 10 or more.")
        for name in ("lr", "inner_lr", "prior_std", "sharpen"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, strict=True)
        for name in ("steps", "samples"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, whole=True)
        if self.temperature is not None:
            check_number("temperature", self.temperature, 0)

    @property
    def is_pretrained(self) -> bool:
        """Whether training starts from a pretrained backbone."""
        return self.backbone != "conv4" or self.pretraining > 0

    def pretraining_seed(self, component: int = 0) -> int:
        """The seed of the pretraining that a component of the run starts from; the first is that of the run's seed."""
        seed = self.seed + component
        return seed if self.backbones is None else seed % self.backbones

    def check(self, folder: Path, names: Optional[Sequence[str]] = None) -> None:
        """
        **Description**

        Raises where a folder holds a run with another config.

        **Arguments**

        * **folder** (Path) - Of the run; one without config.json is fine.
        * **names** (sequence, *optional*, default=None) - The settings that have to agree; all by default.
        """
        if not (folder / "config.json").exists():
            return
        old = Config.load(folder)
        for name in [f.name for f in fields(self)] if names is None else names:
            if getattr(old, name) != getattr(self, name):
                raise CheckpointError(
                    f"{folder} holds a run with {name} = {getattr(old, name)!r}, not {getattr(self, name)!r}: choose "
                    "another folder, or the same settings to resume it."
                )

    def save(self, folder: Path) -> None:
        """Writes config.json to a run's folder; one that is there already must be the same."""
        self.check(folder)
        if (folder / "config.json").exists():
            return
        make_folder(folder)
        write(folder / "config.json", json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Config":
        """The config of a run's folder. Unknown and missing settings are errors, as they may be another version's."""
        path, remedy = Path(folder) / "config.json", "Restore the file, or train anew in another folder."
        if not path.exists():
            raise ArgumentError(f"{folder} is no run's folder: it has no config.json.")
        found, names = read_json(path, remedy), [f.name for f in fields(cls)]
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} holds a {type(found).__name__} and not a run's settings. {remedy}")
        wrong = [f"{name!r} is unknown" for name in found if name not in names]
        wrong += [f"{name!r} is missing" for name in names if name not in found]
        wrong += [f"{name!r} is no text" for name in ("method", "dataset") if not isinstance(found.get(name, ""), str)]
        if wrong:
            raise CheckpointError(f"{path} cannot be read as a run's config: {'; '.join(wrong)}. {remedy}")
        try:
            return cls(**found)
        except ArgumentError as error:
            raise CheckpointError(f"{path} cannot be read as a run's config: {error} {remedy}") from error

    def filled(self, **defaults: Any) -> "Config":
        """A copy with a method's defaults in place of None, and with None for what the method does not have."""
        own = {name: None if value is None else getattr(self, name) for name, value in defaults.items()}
        return replace(self, **{name: defaults[name] if value is None else value for name, value in own.items()})
