"""An episode in closed form: Eq. 13, the expected KL of Eq. 10, and a network drawn from q_i.

Every tensor here is the flat vector of all d random weights, or several of them, (..., d). The prior's precision comes
as `log_variance`, log(V_0 / n_0) = -log P_0.
"""

from typing import Tuple

import torch
from torch import Tensor

from l2l_niw.vectors import blockwise
from l2l_niw.wishart import log_determinant_gap


def adapted_share(a: Tensor, p0: Tensor) -> Tensor:
    """A / (A + P_0): how far each weight's posterior mean goes from m_0 to the chain's mean."""
    return 1.0 / (1.0 + p0 / a)


@blockwise
def episode_posterior(m0: Tensor, log_variance: Tensor, m_bar: Tensor, a: Tensor) -> Tuple[Tensor, Tensor]:
    """
    **Description**

    The minimiser of Eq. 11 for the quadratic loss of Eq. 12 (Eq. 13):

    $$m^* = (A + P_0)^{-1} (A \\bar m + P_0 m_0), \\qquad V^* = (A + P_0)^{-1}.$$
    """
    p0 = torch.exp(-log_variance)
    return m0 + adapted_share(a, p0) * (m_bar - m0), 1.0 / (a + p0)


@blockwise
def draw(m0: Tensor, log_variance: Tensor, m_bar: Tensor, a: Tensor, offset: Tensor) -> Tensor:
    """
    **Description**

    A network from q_i: \\(m^* + \\sqrt{V^*}\\,\\epsilon\\) with \\(\\epsilon = \\sqrt{A}\\,\\)`offset`.
    For `offset` = theta_t - m_bar it carries the chain's state over into the posterior, and equals
    theta_t where the prior is flat. It is the reparametrised draw of f_i (Eq. 14).
    """
    share = adapted_share(a, torch.exp(-log_variance))
    return m0 + share * (m_bar - m0) + torch.sqrt(share) * offset


@blockwise
def slopes(
    gradient: Tensor,
    m0: Tensor,
    log_variance: Tensor,
    m_bar: Tensor,
    a: Tensor,
    offset: Tensor,
    began: bool,
    grew: bool,
    noisy: bool,
    kl_weight: float,
) -> Tuple[Tensor, Tensor]:
    """
    **Description**

    What m_0 and log(V_0 / n_0) get for a gradient in the draw, and for kl_weight times the KL, in one pass.

    **Arguments**

    * **began** (bool) - Whether the chain's mean moves with m_0, where it began,
    * **grew** (bool) - and its distance from there with V_0, as its steps do,
    * **noisy** (bool) - and with it the deviation.
    """
    p0 = torch.exp(-log_variance)
    share = adapted_share(a, p0)
    rest = 1.0 / (1.0 + a / p0)
    distance = m_bar - m0
    moved, deviation = share * distance, share.sqrt() * offset
    slope = torch.add(moved, deviation, alpha=0.5).mul_(rest)  # the share's
    if grew:
        slope += moved + deviation if noisy else moved
    g_m0 = gradient if began else gradient * rest
    g_log_variance = slope.mul_(gradient)
    if not kl_weight:
        return g_m0, g_log_variance
    pull = moved.mul_(share).mul_(p0)
    g_log_variance.add_((rest.sub_(share).mul_(pull).mul_(distance)).addcmul_(share, share), alpha=0.5 * kl_weight)
    return g_m0.sub(pull, alpha=kl_weight), g_log_variance


@blockwise
def posterior_slopes(
    g_mean: Tensor, g_variance: Tensor, m0: Tensor, log_variance: Tensor, m_bar: Tensor, a: Tensor
) -> Tuple[Tensor, Tensor]:
    """What m_0 and log(V_0 / n_0) get for gradients in the posterior's mean and variance."""
    p0 = torch.exp(-log_variance)
    share = adapted_share(a, p0)
    rest = 1.0 / (1.0 + a / p0)
    g_m0 = g_mean * rest
    return g_m0, share * (m_bar - m0) * g_m0 + g_variance * rest / (a + p0)


def expected_kl(mean: Tensor, variance: Tensor, m0: Tensor, log_variance: Tensor, n0: Tensor, wishart: str) -> Tensor:
    """
    **Description**

    \\(\\mathbb{E}_{q(\\phi)} KL(q_i(\\theta) || p(\\theta|\\phi))\\) for l_0 infinite (the supplement's
    closed form, also half of g_i up to its constant), written as the KL to N(m_0, 1 / P_0) plus what
    not knowing Sigma costs. Each summand is non-negative, so that float32 survives d in the millions.
    """
    summands = kl_summands(mean, variance, m0, log_variance)
    return 0.5 * (summands.sum(-1) + log_determinant_gap(n0, mean.shape[-1], wishart).to(mean.dtype))


@blockwise
def kl_summands(mean: Tensor, variance: Tensor, m0: Tensor, log_variance: Tensor) -> Tensor:
    p0 = torch.exp(-log_variance)
    ratio = p0 * variance
    return ratio - 1.0 - torch.log(ratio) + p0 * (mean - m0).square()
