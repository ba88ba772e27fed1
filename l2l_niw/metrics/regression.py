"""Calibration of regression: are the predictive's quantiles the targets' own?"""

from typing import Tuple

import torch
from torch import Tensor

from l2l_niw.checks import check_number
from l2l_niw.errors import ArgumentError


def reliability(cdf: Tensor, bins: int = 20) -> Tuple[Tensor, Tensor]:
    """
    **Description**

    Levels p = 1/bins, 2/bins, ..., 1, and the fraction of targets that lie below the predictive's p-quantile: the
    curve of a reliability diagram. A target is below the quantile where the predictive's distribution function at
    it, `prediction.cdf(y)`, is at most p, so that no quantile is ever computed, for mixtures neither.

    **Arguments**

    * **cdf** (Tensor) - The predictive's distribution function at each target, of any shape.
    * **bins** (int, *optional*, default=20) - The paper's number.
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

    **References**

    1. Kuleshov et al. 2018. "Accurate Uncertainties for Deep Learning Using Calibrated Regression." ICML.

    **Example**

    ~~~python
    r_ece(prediction.cdf(y_query))
    ~~~
    """
    levels, fractions = reliability(cdf, bins)
    return (levels - fractions).abs().mean().item()
