"""The network that all methods share, from a task's inputs to features."""

from collections import OrderedDict
from typing import Any, Callable, Dict

import learn2learn as l2l
import torch
from torch import Tensor, nn

from l2l_niw.errors import ArgumentError
from l2l_niw.models import batch_statistics
from l2l_niw.vision.config import Config
from l2l_niw.vision.transformers import TRANSFORMERS, WithoutPadding

SHAPES = {
    "omniglot": (1, 28),
    "cifarfs": (3, 32),
    "fc100": (3, 32),
    "mini-imagenet": (3, 84),
    "tiered-imagenet": (3, 84),
}  # channels, and pixels per side


class Backbone(nn.Sequential):
    """
    **Description**

    What all backbones have: `features` outputs per input; `last`, the pattern of the names of the last block's weights,
    which a task adapts under NIW; and `rate`, its learning rate relative to that of all else. It computes in bfloat16
    if the config's precision says so; weights and features are float32.

    **Arguments**

    * **config** (Config) - Its precision.
    * **layers** (OrderedDict) - By name.
    * **features** (int) - Outputs per input.
    * **last** (str) - The pattern.
    * **fixed** (bool) - Whether it stays in evaluation mode.
    """

    rate = 1.0

    def __init__(self, config: Config, layers: "OrderedDict[str, nn.Module]", features: int, last: str, fixed: bool):
        super().__init__(layers)
        self.features, self.last, self.fixed = features, last, fixed
        self.low_precision = config.precision == "bfloat16"
        self.train()

    def forward(self, input: Tensor) -> Tensor:
        """Features, (n, features), of inputs, (n, ...)."""
        with torch.autocast(input.device.type, torch.bfloat16, enabled=self.low_precision):
            return super().forward(input).to(input.dtype)

    def train(self, mode: bool = True) -> "Backbone":
        """As of a module, but one that is fixed stays in evaluation mode."""
        return super().train(mode and not self.fixed)


class ChannelsLast(nn.Module):
    """
    **Description**

    The same images in channels-last memory format, in which convolutions on a CPU are about twice as fast; their second
    derivatives, which MAML alone takes, are a quarter slower.
    """

    def forward(self, x: Tensor) -> Tensor:
        """A copy of the images, (n, channels, height, width), in channels-last memory format."""
        return x.clone(memory_format=torch.channels_last)  # with one channel `contiguous` would change nothing


class Conv4(Backbone):
    """
    **Description**

    learn2learn's Conv-4.

    **Arguments**

    * **config** (Config) - Its dataset, its filters, and `batchnorm`: 'batch' takes the statistics of the batch at
        hand, as MAML does, so that queries are predicted from each other; 'running' has the pretraining's, fixed.
    * **pretraining** (bool, *optional*, default=False) - Whether running statistics are to be collected.
    """

    def __init__(self, config: Config, pretraining: bool = False):
        channels, side = SHAPES[config.dataset]
        base = l2l.vision.models.ConvBase(hidden=config.filters, channels=channels, max_pool=True)
        for block in base:  # the maximum first, and then ReLU of it: the same, of a quarter of the numbers
            block.relu, block.max_pool = block.max_pool, block.relu
        layers = OrderedDict([("0", ChannelsLast()), ("1", base), ("2", nn.Flatten())])
        fixed = config.batchnorm == "running" and not pretraining
        super().__init__(config, layers, config.filters * (side // 16) ** 2, "1.3.*", fixed)
        if config.batchnorm == "batch" and not pretraining:
            batch_statistics(self)


class OfOneLength(nn.Module):
    """Features in their own direction, as long as independent ones of variance 1 are, which heads are scaled for."""

    def forward(self, features: Tensor) -> Tensor:
        """(n, features) of the same."""
        return features.shape[-1] ** 0.5 * nn.functional.normalize(features, dim=-1)


class LastBlocks(Backbone):
    """
    **Description**

    The last blocks of a pretrained transformer, from the outputs of those before them to features of one length.

    **Arguments**

    * **config** (Config) - Its backbone, and how many `blocks`.
    """

    rate = 0.005  # heads are new, and a transformer's weights are not

    def __init__(self, config: Config):
        transformer = TRANSFORMERS[config.backbone]
        every: Any = transformer.blocks(None)
        if config.blocks > transformer.depth:
            raise ArgumentError(f"blocks is {config.blocks}, but {config.backbone} has {transformer.depth}.")
        layers = list(every[-config.blocks - 1 :].named_children())  # they keep their numbers
        last = layers[-2][0]
        if transformer.tokeniser is not None:
            layers.insert(0, ("padding", WithoutPadding()))
        layers.append(("length", OfOneLength()))
        super().__init__(config, OrderedDict(layers), transformer.features, f"{last}.*", fixed=True)


BACKBONES: Dict[str, Callable[[Config], Backbone]] = {"conv4": Conv4, **dict.fromkeys(TRANSFORMERS, LastBlocks)}


def make_backbone(config: Config) -> Backbone:
    """The backbone that a config names, with initial weights."""
    return BACKBONES[config.backbone](config)
