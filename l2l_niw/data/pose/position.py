"""Where an object is among others, as numbered tasks."""

from typing import Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from l2l_niw.data.pose.images import place, scene
from l2l_niw.data.pose.tasksets import PoseTaskset
from l2l_niw.data.pose.views import Views
from l2l_niw.data.sine_line import Tasks
from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number


class PositionTaskset(PoseTaskset):
    """
    **Description**

    Where is the object? Every view has the task's object and others, all at random places and azimuths. The others
    change from view to view, so that only what the support's views have in common says which object is meant. Targets
    are row and column of its centre in pixels; the first pixel's centre is at (0, 0).

    **Arguments**

    * **views** (Views) - Of the objects of one split, as large as they are to be in the image.
    * **size** (int, *optional*, default=64) - Height and width of an image.
    * **distractors** (int, *optional*, default=2) - Other objects in an image.
    * **shots, queries, num_tasks, seed** - As of `ViewTaskset`.

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?" CVPR.

    **Example**

    ~~~python
    taskset = PositionTaskset(random_views(primitives(), views=48, size=24))
    ~~~
    """

    def __init__(
        self,
        views: Views,
        size: int = 64,
        distractors: int = 2,
        shots: Union[int, Tuple[int, int]] = (3, 15),
        queries: int = 15,
        num_tasks: int = -1,
        seed: Union[int, Sequence[int]] = 0,
    ):
        super().__init__(len(views.shade), "position", shots, queries, num_tasks, seed)
        check_number("distractors", distractors, 0, whole=True)
        own = views.shade.shape[-1]
        check_number("size", size, own, whole=True)
        if distractors >= self.objects:
            raise ArgumentError(f"distractors is {distractors}, but there are {self.objects} objects: lower it.")
        self.views, self.size, self.distractors = views, size, distractors
        self._places, self._apart = size - own + 1, 0.6 * own
        near = sum(r * r + c * c < self._apart**2 for r in range(-own, own + 1) for c in range(-own, own + 1))
        if distractors * near >= self._places**2:
            raise ArgumentError(
                f"distractors is {distractors}, more than certainly fit: objects of {own} pixels in images of {size}."
            )

    def with_shots(self, i: int, shots: int) -> Tasks:
        """Task i with a number of shots."""
        random, own = self._random(i, 2), self.object_of(i)
        x, y = zip(*(self._view(own, random) for _ in range(self.queries + shots)))
        return self._split(torch.stack(x).unsqueeze(1), torch.tensor(y))

    def _view(self, own: int, random: np.random.Generator) -> Tuple[Tensor, Tuple[float, float]]:
        """An image, and where the object is."""
        others = random.choice(self.objects - 1, self.distractors, replace=False)
        chosen = torch.tensor([own, *(others + (others >= own))])
        corners = place(len(chosen), self._apart, (self._places, self._places), random)
        middle = (self.views.shade.shape[-1] - 1) / 2
        which = torch.from_numpy(random.integers(self.views.shade.shape[1], size=len(chosen)))
        order = random.permutation(len(chosen))  # which is before which says nothing of which is meant
        shade, alpha = (part[chosen, which][order].float() / 255 for part in self.views[:2])
        image = scene(list(shade), list(alpha), [corners[k] for k in order], self.size)
        return image, (corners[0][0] + middle, corners[0][1] + middle)
