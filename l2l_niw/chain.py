"""The Langevin chain of one episode (Sec. 3, "Quadratic approximation of episodic loss via SGLD")."""

from dataclasses import dataclass, replace
from typing import Optional, Tuple

import torch
from torch import Tensor

from l2l_niw.vectors import blockwise


def noise_variance(lr: float, temperature: float, n: int) -> float:
    """The variance that one step's noise adds: 2 lr T / n."""
    return 2.0 * lr * temperature / n


@blockwise
def langevin_step(
    theta: Tensor,
    gradient: Tensor,
    lr: float,
    temperature: float,
    n: int,
    scale: Optional[Tensor] = None,
    noise: Optional[Tensor] = None,
) -> Tensor:
    """
    **Description**

    One Langevin step on l_i = n * loss at temperature T, in units of the mean loss, where a constant
    D scales the step of each weight (1 for None):

    $$\\theta \\gets \\theta - lr\\,D\\,\\nabla loss + \\sqrt{2\\,lr\\,D\\,T / n}\\;\\xi, \\qquad \\xi \\sim N(0, I).$$

    Its drift is MAML's step. For small lr the stationary law is exp(-l_i / T), whatever D. xi is drawn here
    if it is not given as `noise`.

    **References**

    1. Welling and Teh. 2011. "Bayesian Learning via Stochastic Gradient Langevin Dynamics." ICML.
    """
    noise = torch.randn_like(theta) if temperature and noise is None else noise
    size = noise_variance(lr, temperature, n) ** 0.5
    if scale is None:
        moved = torch.sub(theta, gradient, alpha=lr)
        return moved.add_(noise, alpha=size) if temperature else moved
    moved = torch.addcmul(theta, gradient, scale, value=-lr)
    return moved.addcmul_(noise, scale.sqrt(), value=size) if temperature else moved


@blockwise
def moments_with(theta: Tensor, mean: Tensor, m2: Optional[Tensor], kept: int) -> Tuple[Tensor, Tensor]:
    """The mean and the summed squares of `kept` iterates, theta the last of them (Welford)."""
    delta = theta - mean
    mean = torch.add(mean, delta, alpha=1.0 / kept)
    rest = theta - mean
    return mean, delta.mul_(rest) if m2 is None else torch.addcmul(m2, delta, rest)


@blockwise
def difference(theta: Tensor, mean: Tensor) -> Tensor:
    return theta - mean


@blockwise
def spread(theta: Tensor, m2: Optional[Tensor], kept: int, variance: float, scale: Optional[Tensor]) -> Tensor:
    """
    The variance of the kept iterates, with one pseudo-observation of the noise's: the paper's
    regulariser. It vanishes as the chain grows, and is all there is for one iterate.
    """
    pseudo = torch.full_like(theta, variance) if scale is None else variance * scale
    return (pseudo.expand_as(theta) if m2 is None else m2 + pseudo) / kept


@dataclass(frozen=True)
class Chain:
    """
    **Description**

    The state of a chain and the running moments of its kept iterates (Welford), O(d) whatever the
    number of steps. Until the burn-in is over the last iterate alone is kept.

    States are never written to: a query loss that was computed after an earlier step keeps its own.
    """

    theta: Tensor
    mean: Optional[Tensor] = None
    m2: Optional[Tensor] = None
    kept: int = 0
    steps: int = 0

    def append(self, theta: Tensor, burn_in: int) -> "Chain":
        """The chain after one more iterate."""
        steps = self.steps + 1
        if steps <= burn_in + 1:
            return Chain(theta, theta, None, 1, steps)
        mean, m2 = moments_with(theta, self.mean, self.m2, self.kept + 1)
        return replace(self, theta=theta, mean=mean, m2=m2, kept=self.kept + 1, steps=steps)

    def variance(self, variance: float, scale: Optional[Tensor] = None) -> Tensor:
        return spread(self.theta, self.m2, self.kept, variance, scale)
