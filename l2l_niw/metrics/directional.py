"""Densities of directions, and how high a density is at a target: on the circle, the sphere and the plane."""

import math
from typing import Callable, Optional

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number

FAR = -20.0  # below it the moments' closed form loses its digits
TERMS = 8  # of their asymptotic series there: an error below 1e-8


def _log_moment(k: int, d: Tensor) -> Tensor:
    """log of the integral over t > 0 of t^k exp(-t^2 / 2 + d t)."""
    near = d.clamp_min(FAR)
    phi, cdf = torch.exp(-near.square() / 2) / math.sqrt(2 * math.pi), torch.special.ndtr(near)
    moments = [cdf, phi + near * cdf]  # E[t^k; t > 0] of t ~ N(d, 1), by recursion
    mills = torch.special.erfcx(-near.clamp_max(0.0) / math.sqrt(2)) * math.sqrt(math.pi / 2)
    scaled = [mills, 1 + near * mills]  # the same over phi, for d < 0
    for j in range(2, k + 1):
        moments.append(near * moments[-1] + (j - 1) * moments[-2])
        scaled.append(near * scaled[-1] + (j - 1) * scaled[-2])
    above = near.clamp_min(0.0).square() / 2 + math.log(2 * math.pi) / 2 + moments[k].clamp_min(1e-300).log()
    below = scaled[k].clamp_min(1e-300).log()
    far = d.clamp_max(FAR)
    series = sum((-0.5) ** j * math.factorial(k + 2 * j) / math.factorial(j) * far ** (-2 * j) for j in range(TERMS))
    return torch.where(d > 0, above, torch.where(d > FAR, below, series.log() - (k + 1) * (-far).log()))  # type: ignore


def projected_normal(
    y: Tensor, means: Tensor, scales: Tensor, log_weights: Optional[Tensor] = None, antipodal: bool = False
) -> Tensor:
    """
    **Description**

    The log-density of directions y = x / |x| where x is of a mixture of normals with independent components. With
    A = y' S^-1 y, B = y' S^-1 m and C = m' S^-1 m of a component with mean m and covariance S in d dimensions,

        p(y) = (2 pi)^(-d/2) |S|^(-1/2) A^(-d/2) exp(-C / 2)  int_0^inf t^(d-1) exp(-t^2 / 2 + t B / sqrt(A)) dt,

    whose integral has a closed form. On the circle it is in nats per radian, on the sphere of unit quaternions per
    unit of its surface, which is 2 pi^2. Averaged over components, not over their logs.

    **Arguments**

    * **y** (Tensor) - Unit vectors, (..., d).
    * **means, scales** (Tensor) - Means and standard deviations of x, (..., components, d).
    * **log_weights** (Tensor, *optional*, default=None) - (..., components). Equal if not given.
    * **antipodal** (bool, *optional*, default=False) - Whether y and -y are one, as rotations' quaternions are: the
        average of the densities at both.

    **Returns** log-densities, (...), in double precision.

    **References**

    1. Mardia and Jupp. 2000. "Directional Statistics", Sec. 3.5.6 and 9.3.3.

    **Example**

    ~~~python
    means, scales, log_weights = prediction.tensors()  # of a GaussianMixture over (sin, cos)
    nll = -projected_normal(y_query, means, scales, log_weights).mean()
    ~~~
    """
    y, means, scales = y.double(), means.double(), scales.double()
    width = y.shape[-1]
    if means.shape != scales.shape or means.dim() < 2 or means.shape[-1] != width:
        raise ArgumentError(
            f"means and scales must both be (..., components, {width}); got {tuple(means.shape)} and "
            f"{tuple(scales.shape)}."
        )
    if not torch.allclose(torch.linalg.vector_norm(y, dim=-1), y.new_ones(()), atol=1e-4):
        raise ArgumentError("y must be of length 1: divide it by its length.")
    direction = y.unsqueeze(-2) / scales
    length, offset = torch.linalg.vector_norm(direction, dim=-1), means / scales
    along = (direction * offset).sum(-1) / length  # B / sqrt(A)
    base = -0.5 * (offset.square().sum(-1) + width * math.log(2 * math.pi)) - scales.log().sum(-1)
    logs = _log_moment(width - 1, along)
    if antipodal:
        logs = torch.logaddexp(logs, _log_moment(width - 1, -along)) - math.log(2)
    return _mixed(logs + base - width * length.log(), log_weights)


def _mixed(logs: Tensor, log_weights: Optional[Tensor]) -> Tensor:
    """The log of an average of densities, over the last dimension."""
    if log_weights is None:
        return logs.logsumexp(-1) - math.log(logs.shape[-1])
    return (logs + log_weights.double().log_softmax(-1)).logsumexp(-1)


def density_rank(log_density: Callable[[Tensor], Tensor], samples: Tensor, y: Tensor) -> Tensor:
    """
    **Description**

    Of how many samples of a predictive the density is above that at the target. A target is in the highest-density
    region that has a share p of the predictive where (rank + 1) / (samples + 1) is at most p. Of the true predictive
    ranks are uniform on 0, ..., samples, whatever its space and its shape, so that `r_ece` applies to these levels.

    **Arguments**

    * **log_density** (callable) - Of targets, (..., targets), and of samples of them.
    * **samples** (Tensor) - Of the predictive, (samples, ..., targets).
    * **y** (Tensor) - Targets, (..., targets).

    **Returns** ranks, (...).

    **Example**

    ~~~python
    rank = density_rank(prediction.log_prob, prediction.sample((199,)), y_query)
    covered = (rank + 1) / 200 <= 0.9
    ~~~
    """
    check_number("samples", len(samples), 1, whole=True)
    if samples.shape[1:] != y.shape:
        raise ArgumentError(f"samples must be (samples, {', '.join(map(str, y.shape))}); got {tuple(samples.shape)}.")
    return (log_density(samples) > log_density(y)).sum(0)
