"""The convolutional encoder of the pose benchmark."""

import torch
from torch import Tensor, nn

from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number


class PoseEncoder(nn.Module):
    """
    **Description**

    Three strided 3x3 convolutions of 32, 48 and 64 filters, with a 2x2 maximum before the third, and a linear
    layer: the image encoder of the ShapeNet-1D benchmark, which its CNP and ANP share and the ridge
    head stands on. No normalisation.

    **Arguments**

    * **features** (int, *optional*, default=64) - Width of the features.
    * **channels** (int, *optional*, default=1) - Of an image.
    * **size** (int, *optional*, default=128) - Height and width of an image, a multiple of 16.

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?"

    **Example**

    ~~~python
    model = EpisodicModel(PoseEncoder(), CNP(64, targets=2, aggregate='max'))
    ~~~
    """

    def __init__(self, features: int = 64, channels: int = 1, size: int = 128):
        super().__init__()
        check_number("size", size, 16, whole=True)
        if size % 16:
            raise ArgumentError(f"size must be a multiple of 16, got {size}.")
        self.first = nn.Conv2d(channels, 32, 3, stride=2, padding=1)
        self.second = nn.Conv2d(32, 48, 3, stride=2, padding=1)
        self.third = nn.Conv2d(48, 64, 3, stride=2, padding=1)
        self.out = nn.Linear(64 * (size // 16) ** 2, features)

    def forward(self, x: Tensor) -> Tensor:
        """Features, (n, features), of images (n, channels, size, size)."""
        x = torch.relu(self.second(torch.relu(self.first(x))))
        x = nn.functional.max_pool2d(x, 2)
        return self.out(torch.relu(self.third(x)).flatten(1))
