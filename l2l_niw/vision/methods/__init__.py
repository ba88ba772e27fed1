"""The methods that are compared, all with the same backbone."""

from dataclasses import replace
from typing import Dict, List, Optional

import torch

from l2l_niw.errors import ArgumentError
from l2l_niw.vision.config import DATASETS, Config
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
    return [name for name, spec in METHODS.items() if fits(spec, config) is None]


def fits(spec: Spec, config: Config) -> Optional[str]:
    """What of the config a method cannot be trained with, and what to do about it; None if it can be."""
    transformer = config.backbone != "conv4"
    if spec.fixed and not config.is_pretrained:
        return "pretraining must be 1 or more: its backbone stays as it was pretrained. 10 will do."
    if spec.of_transformers and not transformer:
        return "backbone must be a transformer, 'dinov2' or 'minilm': Conv-4 has no linear layers to adapt."
    if spec.transductive and transformer:
        return "backbone must be conv4: a transformer has no BatchNorm. Leave the transductive row out."
    return None


def complete(config: Config) -> Config:
    """A config with the method's defaults in place of None, checked."""
    if config.method not in METHODS:
        raise ArgumentError(f"method must be one of {', '.join(METHODS)}; got {config.method!r}.")
    if config.dataset not in DATASETS:
        raise ArgumentError(f"dataset must be one of {', '.join(DATASETS)}; got {config.dataset!r}.")
    spec = METHODS[config.method]
    reason = fits(spec, config)
    if reason is not None:
        raise ArgumentError(f"{config.method}: {reason}")
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
