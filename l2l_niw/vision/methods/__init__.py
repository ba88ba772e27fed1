"""The methods that are compared, all with the same backbone."""

from dataclasses import replace
from typing import Dict, List

import torch

from l2l_niw.errors import ArgumentError
from l2l_niw.vision.backbone import SHAPES
from l2l_niw.vision.config import Config
from l2l_niw.vision.loops import Method
from l2l_niw.vision.methods.fixed import FIXED
from l2l_niw.vision.methods.gradient import GRADIENT
from l2l_niw.vision.methods.heads import HEADS
from l2l_niw.vision.methods.niw import WITH_NIW
from l2l_niw.vision.methods.several import SEVERAL
from l2l_niw.vision.methods.spec import METHOD_OPTIONS, Spec

METHODS: Dict[str, Spec] = {**GRADIENT, **FIXED, **HEADS, **WITH_NIW, **SEVERAL}


def trainable(config: Config) -> List[str]:
    """The methods that can be trained with a config: a fixed backbone has to be pretrained."""
    return [name for name, spec in METHODS.items() if config.pretraining or not spec.fixed]


def complete(config: Config) -> Config:
    """A config with the method's defaults in place of None, checked."""
    if config.method not in METHODS:
        raise ArgumentError(f"method must be one of {', '.join(METHODS)}; got {config.method!r}.")
    if config.dataset not in SHAPES:
        raise ArgumentError(f"dataset must be one of {', '.join(SHAPES)}; got {config.dataset!r}.")
    spec = METHODS[config.method]
    if spec.fixed and not config.pretraining:
        raise ArgumentError(
            f"pretraining must be 1 or more for {config.method}, whose backbone stays as it was pretrained. 10 will do."
        )
    if spec.shares_tasks and config.meta_batch % spec.components:
        raise ArgumentError(
            f"meta_batch must be a multiple of {spec.components} for {config.method}, whose components share the tasks."
        )
    return config.filled(**{name: getattr(spec, name) for name in METHOD_OPTIONS})


def build(config: Config) -> Method:
    """
    **Description**

    A method with its initial weights, as the config's seed gives them.

    **Arguments**

    * **config** (Config) - Its settings; the method's defaults where they are None.

    **Example**

    ~~~python
    method = build(Config(method='niw-ncc', dataset='omniglot', ways=20))
    ~~~
    """
    config = complete(config)
    spec = METHODS[config.method]
    torch.manual_seed(config.seed)
    return spec.build(replace(config, batchnorm="batch") if spec.transductive else config)


__all__ = ["METHODS", "METHOD_OPTIONS", "Spec", "build", "complete", "trainable"]
