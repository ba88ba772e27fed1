"""The Inverse-Wishart part of q(phi): psi_d, its domain, the expected log-determinant, the mode."""

import math
from typing import Tuple

import torch
from torch import Tensor

WISHARTS = ("factorised", "full")


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
    It is positive and vanishes as n_0 grows.
    """
    half = n0 / 2
    psi = multidigamma(half, d) if wishart == "full" else d * torch.digamma(half)
    return d * torch.log(half) - psi


def gap_slope(raw: Tensor, d: int, wishart: str) -> Tensor:
    """The derivative of `log_determinant_gap` in the unconstrained parameter behind n_0."""
    excess = raw.double().exp()
    half = (excess + lower_bound(wishart, d)) / 2

    def trigammas(top: Tensor, count: int) -> Tensor:  # summed over a progression, as the digammas above
        low = top - (count - 1)
        ends = torch.digamma(top) - torch.digamma(low)
        return ends + top * torch.polygamma(1, top) - (low - 1) * torch.polygamma(1, low)

    if wishart == "full":
        total = trigammas(half, (d + 1) // 2)
        if d > 1:
            total = total + trigammas(half - 0.5, d // 2)
    else:
        total = d * torch.polygamma(1, half)
    return (d / half - total) * excess / 2


def mode(m0: Tensor, log_v0: Tensor, n0: Tensor, wishart: str) -> Tuple[Tensor, Tensor]:
    """
    **Description**

    The mode phi* of q(phi) (Eq. 17): mean m_0 and variance V_0 / (n_0 + d + 2), where d = 1 for each
    of the factorised reading's one-dimensional Wisharts.
    """
    d = m0.numel() if wishart == "full" else 1
    return m0, torch.exp(log_v0 - torch.log(n0 + d + 2).to(log_v0.dtype))


def initial_degrees(wishart: str, d: int) -> float:
    """n_0 at the start: the authors' 1 for d Wisharts; d + 1, one above the smallest integer, for one."""
    return float(d + 1) if wishart == "full" else 1.0


def to_raw(n0: float, wishart: str, d: int) -> float:
    """The unconstrained parameter behind n_0 = bound + exp(raw)."""
    return math.log(n0 - lower_bound(wishart, d))


def from_raw(raw: Tensor, wishart: str, d: int) -> Tensor:
    """n_0 in float64, since d - 1 may be millions while n_0 - (d - 1) is near 1."""
    return raw.double().exp() + lower_bound(wishart, d)
