"""The Inverse-Wishart part of q(phi): n_0's domain, the expected log-determinant with psi_d, the mode (Eq. 17)."""

import math
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

WISHARTS = ("factorised", "full")
Number = TypeVar("Number", float, Tensor)


def multidigamma(a: Tensor, d: int) -> Tensor:
    """
    **Description**

    The multivariate digamma function (the paper's supplement, below the expected KL),

    $$\\psi_d(a) = \\sum_{j=1}^{d} \\psi\\big(a + (1 - j) / 2\\big), \\qquad a > (d - 1) / 2,$$

    in O(1) whatever d. The arguments of even and of odd j are two progressions of step 1, and a sum
    of digammas over such a progression telescopes:

    $$\\sum_{i=0}^{m-1} \\psi(x + i) = (x + m - 1) \\psi(x + m - 1) - (x - 1) \\psi(x) + 1 - m.$$

    **Arguments**

    * **a** (Tensor) - A scalar above (d - 1) / 2, in float64 where d is large.
    * **d** (int) - The dimension.
    """

    def progression(top: Tensor, count: int) -> Tensor:
        low = top - (count - 1)
        return top * torch.digamma(top) - (low - 1) * torch.digamma(low) + (1 - count)

    total = progression(a, (d + 1) // 2)
    if d > 1:
        total = total + progression(a - 0.5, d // 2)
    return total


def lower_bound(wishart: str, d: int) -> float:
    """The open lower end of n_0's domain: d - 1 for one Wishart over all d weights, 0 for d of them."""
    return float(d - 1) if wishart == "full" else 0.0


def log_determinant_gap(n0: Tensor, d: int, wishart: str) -> Tensor:
    """
    **Description**

    What not knowing Sigma costs in the expected KL, times two:

    $$\\mathbb{E}\\log|\\Sigma| - \\log|V_0 / n_0| = d \\log(n_0 / 2) - \\psi_d(n_0 / 2),$$

    with \\(d\\,\\psi(n_0/2)\\) in place of \\(\\psi_d(n_0/2)\\) for d one-dimensional Wisharts.
    It is positive and vanishes as n_0 grows. Where n_0 is so large that the difference would cancel, its
    series in 1 / n_0 is summed instead.
    """
    half = n0 / 2
    far = 1e4 if wishart == "factorised" else 1e4 * d
    if wishart == "factorised":
        return d * (torch.log(half) - torch.digamma(half) if half < far else 1 / (2 * half) + 1 / (12 * half**2))
    if half < far:
        return d * torch.log(half) - multidigamma(half, d)
    # log a - psi(a - j / 2) = (j + 1) / (2 a) + (3 j^2 + 6 j + 2) / (24 a^2) + ..., summed over j = 0 .. d - 1
    first, squares = d * (d + 1) / 2, (d - 1) * d * (2 * d - 1) / 6
    second = 3 * squares + 3 * d * (d - 1) + 2 * d
    third = ((d - 1) * d / 2) ** 2 + 3 * squares + d * (d - 1)
    return first / (2 * half) + second / (24 * half**2) + third / (24 * half**3)


@lru_cache(maxsize=16)
def _gap_slope(raw: float, d: int, wishart: str) -> float:
    """Once for the episodes of one value."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.tensor(raw, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(log_determinant_gap(from_raw(leaf, wishart, d), d, wishart), leaf)[0].item()


def gap_gradient(raw: Tensor, d: int, wishart: str) -> Tensor:
    """The derivative of `log_determinant_gap` in the unconstrained parameter, with a graph where one is recorded."""
    if torch.is_grad_enabled() and raw.requires_grad:
        gap = log_determinant_gap(from_raw(raw, wishart, d), d, wishart)
        return torch.autograd.grad(gap, raw, create_graph=True)[0]
    return torch.full_like(raw, _gap_slope(raw.item(), d, wishart))


def initial_degrees(wishart: str, d: int) -> float:
    """n_0 at the start: the authors' 1 for d Wisharts; d + 1, one above the smallest integer, for one."""
    return float(d + 1) if wishart == "full" else 1.0


def to_raw(n0: float, wishart: str, d: int) -> float:
    """The unconstrained parameter behind n_0 = bound + exp(raw)."""
    return math.log(n0 - lower_bound(wishart, d))


def from_raw(raw: Tensor, wishart: str, d: int) -> Tensor:
    """n_0 in float64, since d - 1 may be millions while n_0 - (d - 1) is near 1."""
    return raw.double().exp() + lower_bound(wishart, d)


def mode_ratio(n0: Number, wishart: str, d: int) -> Number:
    """
    What the mode phi* of q(phi) has for a variance (Eq. 17), relative to V_0 / n_0: n_0 / (n_0 + d + 2), where d = 1
    for each of the factorised reading's one-dimensional Wisharts. Its mean is m_0.
    """
    return n0 / (n0 + (d if wishart == "full" else 1) + 2)
