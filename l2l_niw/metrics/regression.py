"""Calibration of regression: are the predictive's quantiles the targets' own?"""

from typing import Callable, Tuple

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number


def reliability(cdf: Tensor, bins: int = 20) -> Tuple[Tensor, Tensor]:
    """
    **Description**

    Levels p = 1/bins, 2/bins, ..., 1, and the fraction of targets that lie below the predictive's p-quantile: the
    curve of a reliability diagram. A target is below the quantile where the predictive's distribution function at
    it, `prediction.cdf(y)`, is at most p, so that no quantile is ever computed, for mixtures neither.

    **Arguments**

    * **cdf** (Tensor) - The predictive's distribution function at each target, of any shape.
    * **bins** (int, *optional*, default=20) - The paper's number.

    **Returns** levels and fractions, (bins,) each.
    """
    check_number("bins", bins, 1, whole=True)
    cdf = cdf.detach().reshape(-1)
    if not len(cdf):
        raise ArgumentError("cdf is empty: give the predictive's distribution function at one target at least.")
    if not ((cdf >= 0) & (cdf <= 1)).all():
        raise ArgumentError("cdf must lie between 0 and 1 everywhere: give prediction.cdf(y), not y itself.")
    levels = torch.arange(1, bins + 1, dtype=torch.float64, device=cdf.device) / bins
    below = torch.searchsorted(cdf.double().sort().values, levels, right=True)
    return levels, below.double() / len(cdf)


def r_ece(cdf: Tensor, bins: int = 20) -> float:
    """
    **Description**

    The paper's R-ECE: the mean absolute difference between levels and fractions of `reliability`. It is 0 in
    expectation for the true predictive.

    **Arguments**

    * **cdf, bins** - As in `reliability`.

    **Returns** a float between 0 and 1.

    **References**

    1. Kuleshov et al. 2018. "Accurate Uncertainties for Deep Learning Using Calibrated Regression." ICML.

    **Example**

    ~~~python
    r_ece(prediction.cdf(y_query))
    ~~~
    """
    levels, fractions = reliability(cdf, bins)
    return (levels - fractions).abs().mean().item()


def quantile(cdf: Callable[[Tensor], Tensor], level: float, low: Tensor, high: Tensor, steps: int = 50) -> Tensor:
    """
    **Description**

    Where a distribution function reaches a level, by bisection: for predictives that have no quantile function of
    their own, mixtures for one.

    **Arguments**

    * **cdf** (callable) - Increasing, from targets to levels: `prediction.cdf`.
    * **level** (float) - Between 0 and 1.
    * **low, high** (Tensor) - Targets that the quantiles lie between.
    * **steps** (int, *optional*, default=50) - Each halves the error.

    **Returns** the quantiles, of the shape of `low` and `high`.

    **Example**

    ~~~python
    low, high = torch.full_like(prediction.mean, -50.0), torch.full_like(prediction.mean, 50.0)
    band = [quantile(prediction.cdf, level, low, high) for level in (0.05, 0.95)]
    ~~~
    """
    if not 0 < level < 1:
        raise ArgumentError(f"level must lie between 0 and 1, got {level!r}.")
    if not ((cdf(low) <= level) & (cdf(high) >= level)).all():
        raise ArgumentError(f"low and high do not enclose every quantile at level {level}; give a wider range.")
    for _ in range(steps):
        middle = (low + high) / 2
        below = cdf(middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2
