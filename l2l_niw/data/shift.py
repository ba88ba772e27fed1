"""Episodes whose queries are not like the support: corrupted images, and classes that the support does not have."""

from typing import Optional

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from l2l_niw.data._numbered import NumberedEpisodes
from l2l_niw.data.sine_line import Tasks
from l2l_niw.data.tasksets import ClassTaskset
from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number, check_seed

SEVERITIES = {  # of CIFAR-10-C
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
}


def _check_images(images: Tensor) -> None:
    if images.dim() != 4 or not images.is_floating_point() or not ((images >= 0) & (images <= 1)).all():
        raise ArgumentError(
            f"images must be (n, channels, height, width), between 0 and 1; got {images.dtype} of shape "
            f"{tuple(images.shape)}: divide bytes by 255, and normalise afterwards."
        )


def gaussian_noise(images: Tensor, std: float, generator: Optional[torch.Generator] = None) -> Tensor:
    """
    **Description**

    Images with Gaussian noise on every pixel and channel, clipped to [0, 1].

    **Arguments**

    * **images** (Tensor) - Between 0 and 1, (n, channels, height, width).
    * **std** (float) - Standard deviation of the noise.
    * **generator** (torch.Generator, *optional*, default=None) - Where the noise comes from; torch's own by default.
        One on the CPU gives the same noise on every device.
    """
    _check_images(images)
    check_number("std", std, 0)
    device = images.device if generator is None else generator.device
    noise = torch.randn(images.shape, generator=generator, device=device, dtype=images.dtype)
    return (images + std * noise.to(images.device)).clamp(0, 1)


def gaussian_blur(images: Tensor, std: float) -> Tensor:
    """
    **Description**

    Images convolved with a Gaussian that is cut off at 4 standard deviations, as scipy's and scikit-image's are. Pixels
    outside are those of the nearest edge.

    **Arguments**

    * **images** (Tensor) - Between 0 and 1, (n, channels, height, width).
    * **std** (float) - Standard deviation of the Gaussian, in pixels.
    """
    _check_images(images)
    check_number("std", std, 0, strict=True)
    radius = int(4 * std + 0.5)
    kernel = torch.softmax(-0.5 * (torch.arange(-radius, radius + 1).to(images) / std) ** 2, 0)
    planes = F.pad(images, [radius] * 4, mode="replicate").flatten(0, 1).unsqueeze(1)  # channels one by one
    for shape in ((1, 1, -1, 1), (1, 1, 1, -1)):
        planes = F.conv2d(planes, kernel.view(shape))
    return planes.view_as(images).clamp(0, 1)  # of rounding errors


def contrast(images: Tensor, factor: float) -> Tensor:
    """
    **Description**

    Images with less contrast, m + factor (x - m), where m is the mean of an image's channel.

    **Arguments**

    * **images** (Tensor) - Between 0 and 1, (n, channels, height, width).
    * **factor** (float) - What is left of the contrast, from 0, none, to 1, all of it.
    """
    _check_images(images)
    check_number("factor", factor, 0, high=1)
    mean = images.mean((-2, -1), keepdim=True)
    return (mean + factor * (images - mean)).clamp(0, 1)  # of rounding errors


def _sequence(i: int, seed: int) -> np.random.SeedSequence:
    """Where task i's random numbers come from: not where the wrapped taskset's do, also if the seed is the same."""
    return np.random.SeedSequence([i, seed], spawn_key=(1,))


class CorruptedQueries(NumberedEpisodes):
    """
    **Description**

    The tasks of a taskset with corrupted query images. Support and labels are as they were. Task i has the same noise
    whenever it is asked for and at every severity, another one than other tasks.

    Severities are those of CIFAR-10-C, for images of about 32 pixels (ImageNet-C's, for 224, are stronger):

    | kind | | 1 | 2 | 3 | 4 | 5 |
    |---|---|---|---|---|---|---|
    | 'noise' | std of `gaussian_noise` | 0.04 | 0.06 | 0.08 | 0.09 | 0.10 |
    | 'blur' | std of `gaussian_blur` | 0.4 | 0.6 | 0.7 | 0.8 | 1.0 |
    | 'contrast' | factor of `contrast` | 0.75 | 0.5 | 0.4 | 0.3 | 0.15 |

    **Arguments**

    * **taskset** (ImageTaskset, or OpenSetQueries or CorruptedQueries of one) - Where tasks come from.
    * **kind** (str) - 'noise', 'blur' or 'contrast'.
    * **severity** (int) - From 1 to 5.
    * **seed** (int, *optional*, default=0) - Of the noise.
    * **support** (bool, *optional*, default=False) - Whether support images are corrupted too.

    **References**

    1. Hendrycks, Dietterich. 2019. "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations."
        ICLR.

    **Example**

    ~~~python
    taskset = CorruptedQueries(tasksets.test, 'noise', severity=3)
    x, y, x_query, y_query = taskset[17]  # test task 17, with noise on its query
    ~~~
    """

    def __init__(self, taskset: NumberedEpisodes, kind: str, severity: int, seed: int = 0, support: bool = False):
        if not isinstance(taskset, NumberedEpisodes):
            raise ArgumentError(
                f"taskset must be one of images, such as an ImageTaskset; got {type(taskset).__name__}."
            )
        if kind not in SEVERITIES:
            raise ArgumentError(f"kind must be one of {', '.join(SEVERITIES)}; got {kind!r}.")
        check_number("severity", severity, 1, whole=True, high=5)
        check_seed(seed)
        super().__init__(taskset.num_tasks)
        self.taskset, self.kind, self.severity, self.seed, self.support = taskset, kind, severity, seed, support

    def task(self, i: int) -> Tasks:
        """Task i of the taskset, its query corrupted."""
        task = self.taskset.task(i)
        generator = torch.Generator().manual_seed(int(_sequence(i, self.seed).generate_state(1)[0]))
        task = task._replace(x_query=self._corrupted(task.x_query, generator))
        return task._replace(x=self._corrupted(task.x, generator)) if self.support else task

    def _corrupted(self, images: Tensor, generator: torch.Generator) -> Tensor:
        value = SEVERITIES[self.kind][self.severity - 1]
        if self.kind == "noise":
            return gaussian_noise(images, value, generator)
        return gaussian_blur(images, value) if self.kind == "blur" else contrast(images, value)


class OpenSetQueries(NumberedEpisodes):
    """
    **Description**

    The tasks of a taskset with data of other classes added to the query, after the task's own. Support and the task's
    own queries are as they were. `y_query` is **-1** for what was added: `F.cross_entropy(..., ignore_index=-1)` leaves
    it out, `y_query >= 0` says what to score as usual, and `y_query < 0` what to detect. Task i has the same additional
    data whenever it is asked for. Where the taskset turns classes, it turns these too.

    To corrupt all queries alike, wrap this in `CorruptedQueries`.

    **Arguments**

    * **taskset** (ClassTaskset) - Where tasks come from.
    * **classes** (int, *optional*, default=None) - How many other classes per task; the taskset's ways by default.
    * **queries** (int, *optional*, default=None) - Data of each of them; the taskset's queries by default.
    * **seed** (int, *optional*, default=0) - Of the other classes and their data.
    * **unknown** (Tensor, *optional*, default=None) - Inputs of no class, such as texts that are out of scope:
        classes * queries of these are added instead.

    **References**

    1. Liu et al. 2020. "Few-Shot Open-Set Recognition using Meta-Learning." CVPR.

    **Example**

    ~~~python
    taskset = OpenSetQueries(tasksets.test.with_shape(ways=10), classes=5)
    x, y, x_query, y_query = CorruptedQueries(taskset, 'blur', severity=5).sample()
    unknown = y_query < 0
    ~~~
    """

    def __init__(
        self,
        taskset: ClassTaskset,
        classes: Optional[int] = None,
        queries: Optional[int] = None,
        seed: int = 0,
        unknown: Optional[Tensor] = None,
    ):
        if not isinstance(taskset, ClassTaskset):
            raise ArgumentError(
                "taskset must be a ClassTaskset, such as an ImageTaskset, to draw other classes from; got "
                f"{type(taskset).__name__}. To corrupt open-set queries, wrap OpenSetQueries in CorruptedQueries."
            )
        classes = taskset.ways if classes is None else classes
        queries = taskset.queries if queries is None else queries
        check_number("classes", classes, 1, whole=True)
        check_number("queries", queries, 1, whole=True)
        check_seed(seed)
        counts = taskset._counts
        others, least = len(counts) - taskset.ways, counts.min()
        if unknown is not None:
            if unknown.shape[1:] != taskset.inputs.shape[1:] or len(unknown) < classes * queries:
                raise ArgumentError(
                    f"unknown must be {classes * queries} inputs or more of shape {tuple(taskset.inputs.shape[1:])}, "
                    f"as those of the taskset; got {tuple(unknown.shape)}."
                )
        elif classes > others:
            raise ArgumentError(
                f"classes is {classes}, but {taskset.ways} ways leave {others} of {len(counts)} classes: lower "
                "classes, or the taskset's ways."
            )
        elif queries > least:
            raise ArgumentError(f"queries is {queries}, but a class has {least} examples: lower it.")
        super().__init__(taskset.num_tasks)
        self.taskset, self.classes, self.queries, self.seed = taskset, classes, queries, seed
        self.unknown = unknown

    def task(self, i: int) -> Tasks:
        """Task i of the taskset, with classes * queries data more in its query, labelled -1."""
        task, random = self.taskset.task(i), np.random.default_rng(_sequence(i, self.seed))
        if self.unknown is not None:
            added = self.unknown[random.choice(len(self.unknown), self.classes * self.queries, replace=False)]
        else:
            others = np.setdiff1d(np.arange(len(self.taskset._counts)), self.taskset._classes(i)[1])
            chosen = random.choice(others, self.classes, replace=False)
            added = self.taskset._drawn(random, chosen, self.queries).flatten(0, 1)
        labels = task.y_query.new_full((len(added),), -1)
        return task._replace(x_query=torch.cat([task.x_query, added]), y_query=torch.cat([task.y_query, labels]))
