"""The network that all methods share."""

import learn2learn as l2l
import torch
from torch import Tensor, nn

from l2l_niw.models import batch_statistics
from l2l_niw.vision.config import Config

SHAPES = {
    "omniglot": (1, 28),
    "cifarfs": (3, 32),
    "fc100": (3, 32),
    "mini-imagenet": (3, 84),
    "tiered-imagenet": (3, 84),
}  # channels, and pixels per side


class ChannelsLast(nn.Module):
    """
    **Description**

    The same images in channels-last memory format, in which convolutions on a CPU are about twice as fast; their second
    derivatives, which MAML alone takes, are a quarter slower.
    """

    def forward(self, x: Tensor) -> Tensor:
        """A copy of the images, (n, channels, height, width), in channels-last memory format."""
        return x.clone(memory_format=torch.channels_last)  # with one channel `contiguous` would change nothing


class Backbone(nn.Sequential):
    """
    **Description**

    learn2learn's Conv-4, with `features` outputs per image.

    **Arguments**

    * **config** (Config) - Its dataset, its filters, and `batchnorm`: 'batch' takes the statistics of the batch at
        hand, as MAML does, so that queries are predicted from each other; 'running' has the pretraining's, fixed.
        `precision` is what it computes in; weights and features are float32.
    * **pretraining** (bool, *optional*, default=False) - Whether running statistics are to be collected.
    """

    def __init__(self, config: Config, pretraining: bool = False):
        channels, side = SHAPES[config.dataset]
        base = l2l.vision.models.ConvBase(hidden=config.filters, channels=channels, max_pool=True)
        for block in base:  # the maximum first, and then ReLU of it: the same, of a quarter of the numbers
            block.relu, block.max_pool = block.max_pool, block.relu
        self.fixed_statistics = config.batchnorm == "running" and not pretraining
        super().__init__(ChannelsLast(), base, nn.Flatten())
        if config.batchnorm == "batch" and not pretraining:
            batch_statistics(self)
        self.features = config.filters * (side // 16) ** 2
        self.low_precision = config.precision == "bfloat16"
        self.train()

    def forward(self, input: Tensor) -> Tensor:
        """Features, (n, features), of images, (n, channels, height, width)."""
        with torch.autocast(input.device.type, torch.bfloat16, enabled=self.low_precision):
            return super().forward(input).to(input.dtype)

    def train(self, mode: bool = True) -> "Backbone":
        """As of a module, but one with fixed statistics stays in evaluation mode."""
        return super().train(mode and not self.fixed_statistics)
