"""What a method of the comparison is: its title, its defaults, and how it is built from a config."""

from dataclasses import dataclass
from typing import Callable, Optional

from l2l_niw.vision.config import Config
from l2l_niw.vision.loops import Method

METHOD_OPTIONS = (
    "lr", "inner_lr", "steps", "temperature", "prior_std", "samples", "sharpen",
)  # with a default per method  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """
    **Description**

    A method of the comparison.

    **Arguments**

    * **title** (str) - Its name in tables.
    * **build** (callable) - From a config to a method.
    * **lr, inner_lr, steps, temperature, prior_std, samples, sharpen** - Defaults of `METHOD_OPTIONS`; None for what
        the method does not have.
    * **baseline** (str, *optional*, default=None) - The method with the same network and without NIW.
    * **fixed** (bool, *optional*, default=False) - Whether the backbone stays as it was pretrained.
    * **components** (int, *optional*, default=1) - Of a mixture or an ensemble, each with a pretraining of its own.
    * **shares_tasks** (bool, *optional*, default=False) - Whether its components have as many training tasks together
        as another method has; otherwise each of them has as many.
    * **settings_of** (str, *optional*, default=None) - The method whose searched settings it takes.
    * **transductive** (bool, *optional*, default=False) - Whether BatchNorm takes the batch's statistics, whatever the
        config says, so that queries are predicted from each other.
    * **of_transformers** (bool, *optional*, default=False) - Whether its backbone has to be a transformer.
    """

    title: str
    build: Callable[[Config], Method]
    lr: float = 0.001
    inner_lr: Optional[float] = None
    steps: Optional[int] = None
    temperature: Optional[float] = None
    prior_std: Optional[float] = None
    samples: Optional[int] = None
    sharpen: Optional[float] = None
    baseline: Optional[str] = None
    fixed: bool = False
    components: int = 1
    shares_tasks: bool = False
    settings_of: Optional[str] = None
    transductive: bool = False
    of_transformers: bool = False
