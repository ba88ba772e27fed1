"""What images are made of: backgrounds, objects on them, several objects in one, and random changes of them."""

from typing import List, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from l2l_niw.errors import ArgumentError

CELLS = (2, 4, 8, 16)  # along a side of the noise, from clouds to speckles


def backgrounds(count: int, channels: int, size: int, random: np.random.Generator) -> Tensor:
    """
    **Description**

    Patterns for lack of photographs: smooth noise in one of four widths, or a gradient in any direction, each between
    two random colours.

    **Arguments**

    * **count, channels, size** (int) - Of the images.
    * **random** (numpy.random.Generator) - Where the patterns come from.

    **Returns** images between 0 and 1, (count, channels, size, size).
    """
    colours = torch.from_numpy(random.uniform(size=(2, count, channels, 1, 1)).astype(np.float32))
    kinds = random.integers(len(CELLS) + 1, size=count)
    side = torch.linspace(-1, 1, size)
    angles = torch.from_numpy(random.uniform(0, 2 * np.pi, count).astype(np.float32)).view(-1, 1, 1)
    mix = 0.5 + (side.view(1, -1, 1) * angles.sin() + side.view(1, 1, -1) * angles.cos()) / 8**0.5
    for kind, cells in enumerate(CELLS):
        own = np.flatnonzero(kinds == kind)
        noise = torch.from_numpy(random.uniform(size=(len(own), 1, cells, cells)).astype(np.float32))
        if len(own):
            mix[own] = F.interpolate(noise, (size, size), mode="bilinear", align_corners=True).squeeze(1)
    mix = mix.unsqueeze(1)
    return mix * colours[0] + (1 - mix) * colours[1]


def over(images: Tensor, alpha: Tensor, behind: Tensor) -> Tensor:
    """Objects on black, before something: images + (1 - alpha) behind, all between 0 and 1."""
    return images + (1 - alpha) * behind


def on_backgrounds(images: Tensor, alpha: Tensor, random: np.random.Generator) -> Tensor:
    """Images in bytes, (objects, views, channels, size, size), with a background each; alpha has no channels."""
    new = torch.empty_like(images)
    for own, cover, filled in zip(images, alpha, new):  # object by object: all of them in floats would take gigabytes
        behind = backgrounds(len(own), own.shape[1], own.shape[-1], random)
        filled.copy_((255 * over(own / 255, cover.unsqueeze(1) / 255, behind)).round())
    return new


def place(count: int, apart: float, positions: Tuple[int, int], random: np.random.Generator) -> List[Tuple[int, int]]:
    """
    **Description**

    Places for objects: the first anywhere, every other one anywhere that is far enough from those before.

    **Arguments**

    * **count** (int) - How many.
    * **apart** (float) - Least distance between two.
    * **positions** (tuple) - Rows and columns to choose from.
    * **random** (numpy.random.Generator) - Where the places come from.

    **Returns** rows and columns.
    """
    rows, columns = np.indices(positions)
    free = np.ones(positions, bool)
    found: List[Tuple[int, int]] = []
    for _ in range(count):
        choices = np.flatnonzero(free)
        if not len(choices):
            raise ArgumentError(f"{count} objects do not fit: lower their number, their size or the distance.")
        row, column = divmod(int(random.choice(choices)), positions[1])
        free &= (rows - row) ** 2 + (columns - column) ** 2 >= apart**2
        found.append((row, column))
    return found


def scene(shades: Sequence[Tensor], alphas: Sequence[Tensor], corners: Sequence[Tuple[int, int]], size: int) -> Tensor:
    """
    **Description**

    Several objects in one image on black, later ones before earlier ones. Since an orthographic camera sees the same of
    an object wherever it is, this is the image that it would have of all of them together.

    **Arguments**

    * **shades, alphas** (sequence) - Of every object, between 0 and 1, (height, width).
    * **corners** (sequence) - Row and column of every object's upper left corner in the image.
    * **size** (int) - Height and width of the image.
    """
    image = torch.zeros(size, size)
    for shade, alpha, (row, column) in zip(shades, alphas, corners):
        part = image[row : row + shade.shape[0], column : column + shade.shape[1]]
        part.copy_(over(shade, alpha, part))
    return image


def augmented(images: Tensor, random: np.random.Generator, moved: bool = True) -> Tensor:
    """
    **Description**

    Every image changed at random, each change with probability 1/2: scaled by 0.8 to 1.2 along either axis and shifted
    by up to a tenth (what comes in from outside is the nearest edge); gamma from 1/2 to 2; brightness by up to 30 of
    255 levels; a 3x3 average; and pixels dropped, 1 to 10% of single ones or a patch of up to a quarter of a side.

    **Arguments**

    * **images** (Tensor) - Between 0 and 1, (n, channels, height, width).
    * **random** (numpy.random.Generator) - Where the changes come from.
    * **moved** (bool, *optional*, default=True) - Whether images are scaled and shifted, which targets that are
        positions do not allow.

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?" CVPR.
    """

    def drawn(low: float, high: float, idle: float) -> Tensor:
        """One number per image, or what changes nothing."""
        own = np.where(random.random(len(images)) < 0.5, random.uniform(low, high, len(images)), idle)
        return torch.from_numpy(own).to(images).view(-1, 1, 1, 1)

    scale, shift = random.uniform(0.8, 1.2, (len(images), 2)), random.uniform(-0.1, 0.1, (len(images), 2))
    chosen = random.random(len(images)) < 0.5
    if moved and chosen.any():
        images = images.clone()
        images[chosen] = _moved(images[chosen], scale[chosen], shift[chosen])
    images = images.clamp(0, 1) ** (2 ** drawn(-1, 1, 0))
    images = (images + drawn(-30 / 255, 30 / 255, 0)).clamp(0, 1)
    blurred = F.avg_pool2d(F.pad(images, [1] * 4, mode="replicate"), 3, 1)
    images = images + drawn(1, 1, 0) * (blurred - images)
    return images * _kept(len(images), images.shape[-2:], random).to(images)


def _moved(images: Tensor, scale: np.ndarray, shift: np.ndarray) -> Tensor:
    """Images scaled about their middle and shifted by parts of their width and height, column (x) first."""
    matrix = np.zeros((len(images), 2, 3))
    matrix[:, [0, 1], [0, 1]] = 1 / scale
    matrix[:, :, 2] = -2 * shift / scale  # where a pixel of the new image comes from; the image is 2 wide
    grid = F.affine_grid(torch.from_numpy(matrix).to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _kept(count: int, shape: Sequence[int], random: np.random.Generator) -> Tensor:
    """1 where a pixel stays and 0 where it is dropped, (count, 1, height, width)."""
    kept = np.ones((count, 1, *shape), np.float32)
    for own, chosen, single in zip(kept, random.random(count) < 0.5, random.random(count) < 0.5):
        if chosen and single:
            own[0] = random.random(shape) >= random.uniform(0.01, 0.1)
        elif chosen:
            height, width = (max(1, int(n * random.uniform(0, 0.25))) for n in shape)
            row, column = random.integers(shape[0] - height + 1), random.integers(shape[1] - width + 1)
            own[0, row : row + height, column : column + width] = 0
    return torch.from_numpy(kept)
