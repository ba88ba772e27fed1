"""An episode in closed form: Eq. 13, the expected KL of Eq. 10, and a network drawn from q_i.

Every tensor here is the flat vector of all d random weights, or several of them, (..., d).
"""

from typing import Tuple

import torch
from torch import Tensor

from l2l_niw.wishart import log_determinant_gap


def adapted_share(a: Tensor, p0: Tensor) -> Tensor:
    """A / (A + P_0): how far each weight's posterior mean goes from m_0 to the chain's mean."""
    return 1.0 / (1.0 + p0 / a)


def episode_posterior(m0: Tensor, p0: Tensor, m_bar: Tensor, a: Tensor) -> Tuple[Tensor, Tensor]:
    """
    **Description**

    The minimiser of Eq. 11 for the quadratic loss of Eq. 12 (Eq. 13):

    $$m^* = (A + P_0)^{-1} (A \\bar m + P_0 m_0), \\qquad V^* = (A + P_0)^{-1}.$$
    """
    return m0 + adapted_share(a, p0) * (m_bar - m0), 1.0 / (a + p0)


def draw(m0: Tensor, p0: Tensor, m_bar: Tensor, a: Tensor, offset: Tensor) -> Tensor:
    """
    **Description**

    A network from q_i: \\(m^* + \\sqrt{V^*}\\,\\epsilon\\) with \\(\\epsilon = \\sqrt{A}\\,\\)`offset`.
    For `offset` = theta_t - m_bar it carries the chain's state over into the posterior, and equals
    theta_t where the prior is flat. It is the reparametrised draw of f_i (Eq. 14).
    """
    share = adapted_share(a, p0)
    return m0 + share * (m_bar - m0) + torch.sqrt(share) * offset


def expected_kl(mean: Tensor, variance: Tensor, m0: Tensor, p0: Tensor, n0: Tensor, wishart: str) -> Tensor:
    """
    **Description**

    \\(\\mathbb{E}_{q(\\phi)} KL(q_i(\\theta) || p(\\theta|\\phi))\\) for l_0 infinite (the supplement's
    closed form, also half of g_i up to its constant), written as the KL to N(m_0, 1 / P_0) plus what
    not knowing Sigma costs. Each summand is non-negative, so that float32 survives d in the millions.
    """
    ratio = p0 * variance
    gaussian = (ratio - 1.0 - torch.log(ratio) + p0 * (mean - m0).square()).sum(-1)
    return 0.5 * (gaussian + log_determinant_gap(n0, mean.shape[-1], wishart).to(gaussian.dtype))
