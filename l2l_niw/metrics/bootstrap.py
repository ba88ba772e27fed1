"""Intervals for means over tasks, by resampling tasks."""

from typing import NamedTuple

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number


class Interval(NamedTuple):
    """A mean over tasks, and the interval that holds it."""

    mean: float
    low: float
    high: float


def bootstrap(values: Tensor, resamples: int = 2000, level: float = 0.95, seed: int = 0) -> Interval:
    """
    **Description**

    The mean of one value per task, with its percentile interval over resampled sets of tasks. For the difference of
    two methods give the differences on the same tasks: pairing removes what makes tasks easy or hard. Where training
    was repeated, give one row per run: runs are resampled too, and the interval tells of their differences too, which
    are stretched by sqrt(k / (k - 1)) for k runs, or resampling would make a few of them seem more alike.

    **Arguments**

    * **values** (Tensor) - One per task, (tasks,) or (runs, tasks).
    * **resamples** (int, *optional*, default=2000) - Sets of tasks that are drawn, with replacement.
    * **level** (float, *optional*, default=0.95) - How often the interval holds the mean.
    * **seed** (int, *optional*, default=0) - Makes the interval repeatable.

    **Returns** an `Interval`: the mean and both ends of the interval.
    """
    check_number("resamples", resamples, 1, whole=True)
    if not 0 < level < 1:
        raise ArgumentError(f"level must lie between 0 and 1, got {level!r}.")
    values = values.detach().double()
    if values.dim() not in (1, 2) or values.shape[-1] < 2 or not torch.isfinite(values).all():
        raise ArgumentError("values must be finite, one per task, of two tasks at least: (tasks,) or (runs, tasks).")
    rows = values.reshape(-1, values.shape[-1])
    runs, tasks = rows.shape
    if runs > 1:
        rows = rows.mean(0) + (rows - rows.mean(0)) * (runs / (runs - 1)) ** 0.5
    generator = torch.Generator().manual_seed(seed)

    def resample() -> Tensor:
        per_task = rows[torch.randint(runs, (runs,), generator=generator)].mean(0) if runs > 1 else rows[0]
        return per_task[torch.randint(tasks, (tasks,), generator=generator)].mean()

    means = torch.stack([resample() for _ in range(resamples)])
    low, high = torch.quantile(means, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=means.dtype)).tolist()
    return Interval(values.mean().item(), low, high)
