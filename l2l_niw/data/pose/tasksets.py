"""Pose estimation as numbered tasks: one object is one task, its views are support and query."""

from abc import abstractmethod
from typing import NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from l2l_niw.data._numbered import NumberedEpisodes
from l2l_niw.data.pose.images import augmented, backgrounds, over
from l2l_niw.data.pose.targets import OFFSETS, WIDTHS
from l2l_niw.data.sine_line import Tasks
from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number, check_seed


class PoseData(NamedTuple):
    """
    Views of objects and their poses.

    * `images` - In bytes, (objects, views, channels, height, width).
    * `targets` - (objects, views, targets).
    * `kind` - Of the targets: 'vector', 'scaled', 'quaternion' or 'position'.
    * `alpha` - Where images are of an object on black and can get a background, how much of a pixel it covers: in
      bytes, (objects, views, height, width). Else None.
    """

    images: Tensor
    targets: Tensor
    kind: str
    alpha: Optional[Tensor] = None


class PoseTaskset(NumberedEpisodes):
    """
    **Description**

    What tasksets of pose estimation have in common: a number of shots that can differ from task to task. `taskset[i]`
    and `sample()` draw it for every task by itself; `batch(n)` needs one for all, and takes that of its first task.
    Either way task i has the same object and queries, and with fewer shots the first ones of its support.

    **Arguments**

    * **objects** (int) - How many there are to draw from.
    * **kind** (str) - Of the targets, as of `PoseData`.
    * **shots** (int or pair) - Views in the support, or the least and the greatest number of them.
    * **queries** (int) - Views in the query.
    * **num_tasks** (int) - How many there are; -1 for no end.
    * **seed** (int or sequence) - Of the tasks.
    """

    def __init__(
        self,
        objects: int,
        kind: str,
        shots: Union[int, Tuple[int, int]],
        queries: int,
        num_tasks: int,
        seed: Union[int, Sequence[int]],
    ):
        super().__init__(num_tasks)
        low, high = (shots, shots) if isinstance(shots, int) else shots
        check_number("shots", low, 1, whole=True)
        check_number("shots: the greatest number", high, low, whole=True)
        check_number("queries", queries, 1, whole=True)
        check_number("objects", objects, 1, whole=True)
        for number in np.atleast_1d(seed):
            check_seed(int(number))
        if kind not in OFFSETS:
            raise ArgumentError(f"kind must be one of {', '.join(OFFSETS)}; got {kind!r}.")
        self.objects, self.kind, self.shots, self.queries, self.seed = objects, kind, (low, high), queries, seed

    @abstractmethod
    def with_shots(self, i: int, shots: int) -> Tasks:
        """Task i with a number of shots."""

    def shots_of(self, i: int) -> int:
        """How many shots task i has by itself."""
        low, high = self.shots
        return int(self._random(i, 1).integers(low, high + 1))

    def object_of(self, i: int) -> int:
        """The number of task i's object."""
        return int(self._random(i, 0).integers(self.objects))

    def task(self, i: int) -> Tasks:
        """Task i, with its own number of shots."""
        return self.with_shots(i, self.shots_of(i))

    def batch(self, n: int) -> Tasks:
        """The next n tasks, stacked, all with the first one's number of shots: tensors have a leading dimension n."""
        check_number("n", n, 1, whole=True)
        shots = self.shots_of(self.position)
        tasks = []
        for _ in range(n):
            tasks.append(self.with_shots(self.position, shots))
            self.position = (self.position + 1) % (2**62 if self.num_tasks < 0 else self.num_tasks)
        return Tasks(*(torch.stack(parts) for parts in zip(*tasks)))

    def _random(self, i: int, purpose: int) -> np.random.Generator:
        """Task i's random numbers: one stream for each purpose, so that none depends on how much another one draws."""
        return np.random.default_rng(np.random.SeedSequence([i, *np.atleast_1d(self.seed)], spawn_key=(purpose,)))

    def _split(self, x: Tensor, y: Tensor) -> Tasks:
        """Support and query of a task's views: the query is first, and does not depend on the number of shots."""
        return Tasks(x[self.queries :], y[self.queries :], x[: self.queries], y[: self.queries])


class ViewTaskset(PoseTaskset):
    """
    **Description**

    Tasks of views that there are: the angles of an object. A task is one object, and its views are drawn without
    replacement.

    **Arguments**

    * **data** (PoseData) - Views of the objects of one split.
    * **shots** (int or pair, *optional*, default=(3, 15)) - Views in the support, or the least and the greatest number
        of them.
    * **queries** (int, *optional*, default=15) - Views in the query, all others than the support's.
    * **num_tasks** (int, *optional*, default=-1) - How many there are; -1 for no end.
    * **randomised** (bool, *optional*, default=False) - Domain randomisation: whether every view gets a new background
        in every task, where `data` has an alpha.
    * **seed** (int or sequence, *optional*, default=0) - Of the tasks.

    **Example**

    ~~~python
    taskset = ViewTaskset(load_shapenet1d('~/data/ShapeNet1D').train)
    x, y, x_query, y_query = taskset.batch(10)  # x is (10, shots, 1, 128, 128)
    ~~~
    """

    def __init__(
        self,
        data: PoseData,
        shots: Union[int, Tuple[int, int]] = (3, 15),
        queries: int = 15,
        num_tasks: int = -1,
        randomised: bool = False,
        seed: Union[int, Sequence[int]] = 0,
    ):
        super().__init__(len(data.images), data.kind, shots, queries, num_tasks, seed)
        if data.images.dtype != torch.uint8 or data.images.dim() != 5:
            raise ArgumentError(
                "data must have images in bytes, (objects, views, channels, height, width); got "
                f"{data.images.dtype} of shape {tuple(data.images.shape)}."
            )
        shape = (*data.images.shape[:2], WIDTHS[data.kind])
        if data.targets.shape != shape:
            raise ArgumentError(f"data must have targets of shape {shape}, got {tuple(data.targets.shape)}.")
        if self.shots[1] + queries > shape[1]:
            raise ArgumentError(
                f"shots + queries is {self.shots[1] + queries}, but an object has {shape[1]} views: lower one of them."
            )
        if randomised and data.alpha is None:
            raise ArgumentError("randomised: data has no alpha, so that nothing tells the object from its background.")
        self.data, self.randomised = data, randomised

    def with_shots(self, i: int, shots: int) -> Tasks:
        """Task i with a number of shots."""
        own = self.object_of(i)
        views = self._random(i, 2).permutation(self.data.images.shape[1])[: self.queries + shots]
        chosen = torch.from_numpy(views)
        x = self.data.images[own, chosen].float() / 255
        if self.randomised and self.data.alpha is not None:
            alpha = self.data.alpha[own, chosen].unsqueeze(1).float() / 255
            x = over(x, alpha, backgrounds(len(x), x.shape[1], x.shape[-1], self._random(i, 3)))
        return self._split(x, self.data.targets[own, chosen])


class AugmentedTaskset(PoseTaskset):
    """
    **Description**

    The tasks of a taskset, changed at random, task i always in the same way. Data augmentation changes every image by
    itself (`augmented`; where targets are positions, nothing is scaled or shifted). Task augmentation gives all targets
    of a task, support's and query's, one random offset round the circle, so that they cannot be told from an image
    without the support: any angle for azimuths, up to half a turn back about the vertical axis for quaternions, up
    to an eighth of the image for positions.

    **Arguments**

    * **taskset** (PoseTaskset) - Where tasks come from.
    * **images** (bool, *optional*, default=True) - Data augmentation.
    * **targets** (bool, *optional*, default=True) - Task augmentation.
    * **seed** (int, *optional*, default=0) - Of the changes.

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?" CVPR.

    **Example**

    ~~~python
    train = AugmentedTaskset(tasksets.train)
    ~~~
    """

    def __init__(self, taskset: PoseTaskset, images: bool = True, targets: bool = True, seed: int = 0):
        if not isinstance(taskset, PoseTaskset):
            raise ArgumentError(f"taskset must be one of pose estimation; got {type(taskset).__name__}.")
        super().__init__(taskset.objects, taskset.kind, taskset.shots, taskset.queries, taskset.num_tasks, seed)
        self.taskset, self.images, self.targets = taskset, images, targets

    def shots_of(self, i: int) -> int:
        """How many shots task i has by itself."""
        return self.taskset.shots_of(i)

    def object_of(self, i: int) -> int:
        """The number of task i's object."""
        return self.taskset.object_of(i)

    def with_shots(self, i: int, shots: int) -> Tasks:
        """Task i with a number of shots."""
        x, y, x_query, y_query = self.taskset.with_shots(i, shots)
        if self.images:
            moved = self.kind != "position"
            x, x_query = augmented(x, self._random(i, 4), moved), augmented(x_query, self._random(i, 5), moved)
        if self.targets:
            both = OFFSETS[self.kind](torch.cat([y, y_query]), self._random(i, 6), x.shape[-1])
            y, y_query = both[: len(y)], both[len(y) :]
        return Tasks(x, y, x_query, y_query)
