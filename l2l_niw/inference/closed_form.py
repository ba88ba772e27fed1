"""An episode in closed form (Eq. 13), and a network drawn from it. Every function is of one weight tensor."""

from typing import Tuple

import torch
from torch import Tensor


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


def draw(m0: Tensor, p0: Tensor, m_bar: Tensor, a: Tensor, deviation: Tensor) -> Tensor:
    """
    **Description**

    A network from q_i: \\(m^* + \\sqrt{V^*}\\,\\epsilon\\) with \\(\\epsilon = \\sqrt{A}\\,\\)`deviation`.
    For `deviation` = theta_t - m_bar it carries the chain's state over into the posterior, and equals
    theta_t where the prior is flat. It is the reparametrised draw of f_i (Eq. 14).
    """
    share = adapted_share(a, p0)
    return m0 + share * (m_bar - m0) + torch.sqrt(share) * deviation
