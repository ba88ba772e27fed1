"""q_i, the posterior of an episode's weights, from its chain: for all weights, by either way of inference.

With the prior in the chain, the chain samples q_i itself. Without it, the paper's way, the chain yields the quadratic
approximation of the loss (m_bar, A), and Eq. 13 adds the prior in closed form.
"""

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from l2l_niw.inference.chain import Chain, Settings, iterate_variance, mean_of
from l2l_niw.inference.closed_form import draw, episode_posterior
from l2l_niw.inference.curvature import Curvature
from l2l_niw.inference.prior import Prior

Scale = Optional[Sequence[Tensor]]


@torch.no_grad()
def chain_precision(
    chain: Chain, i: int, scale: Scale, curvature: Curvature, settings: Settings
) -> Tuple[Tensor, Tensor]:
    """What the chain says of one weight's precision: within its bounds, and as it was."""
    raw = torch.zeros_like(chain.theta[i])
    if chain.used[i]:
        raw = curvature.precision(chain, i, scale, settings.temperature)
    return raw.clamp(*settings.precision_bounds), raw


def posterior(
    chain: Chain,
    prior: Prior,
    scale: Scale,
    curvature: Curvature,
    settings: Settings,
    mean: Optional[Sequence[Tensor]] = None,
) -> Tuple[List[Tensor], List[Tensor]]:
    """
    q_i's means and variances, as functions of L_0 and of `mean`, the chain's mean with the graph that it is to have; a
    constant if it is not given.
    """
    means, variances = [], []
    mean = mean or [t.detach() for t in mean_of(chain)]
    for i, (m_bar, m0, log_variance) in enumerate(zip(mean, prior.m0, prior.log_variance)):
        if settings.prior_in_chain and chain.used[i] and curvature.noisy:  # the chain samples q_i itself
            low, high = settings.precision_bounds
            own, variance = m_bar, torch.zeros_like(m_bar.detach())  # a spike at T = 0, wherever the iterates are
            if settings.temperature:
                variance = iterate_variance(chain, i, scale).clamp(1.0 / high, 1.0 / low)
        else:
            a, _ = chain_precision(chain, i, scale, curvature, settings)
            own, variance = episode_posterior(m0, log_variance, m_bar, a)
            own = m_bar if settings.prior_in_chain and chain.used[i] else own
        means.append(own)
        variances.append(variance)
    return means, variances


def draw_network(
    chain: Chain, m_bar: Sequence[Tensor], prior: Prior, scale: Scale, curvature: Curvature, settings: Settings
) -> List[Tensor]:
    """
    **Description**

    The network that a query runs in closed form, a function of L_0 and of the chain's mean.

    **Arguments**

    * **m_bar** (list) - The chain's mean, with the graph that it is to have.
    """
    drawn = []
    for i, (own, m0, log_variance) in enumerate(zip(m_bar, prior.m0, prior.log_variance)):
        a, _ = chain_precision(chain, i, scale, curvature, settings)
        deviation = curvature.deviation(chain, i, a).detach()
        drawn.append(draw(m0, log_variance, own, a, deviation).to(own.dtype))
    return drawn
