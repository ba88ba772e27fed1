"""q_i, the posterior of an episode's weights, from its chain: for all weights, by either way of inference.

With the prior in the chain, the chain samples q_i itself. Without it, the paper's way, the chain yields the quadratic
approximation of the loss (m_bar, A), and Eq. 13 adds the prior in closed form.
"""

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from l2l_niw.inference.chain import Chain, Settings, mean_of
from l2l_niw.inference.closed_form import draw, episode_posterior
from l2l_niw.inference.curvature import Curvature
from l2l_niw.inference.prior import Prior


@torch.no_grad()
def chain_precision(
    chain: Chain, i: int, prior: Prior, curvature: Curvature, settings: Settings, bounded: bool = True
) -> Tensor:
    """What the chain says of some weights' precision, within its bounds or as it is."""
    if not chain.used[i]:
        found = torch.zeros_like(chain.theta[i])
    else:
        scale = prior.scale(i) if settings.learn_step_sizes else None
        found = curvature.precision(chain, i, scale, settings.temperature)
    return found.clamp(*settings.precision_bounds) if bounded else found


def samples_posterior(chain: Chain, i: int, curvature: Curvature, settings: Settings) -> bool:
    """Whether the chain's precision of a weight is the posterior's, rather than the likelihood's."""
    return settings.prior_in_chain and curvature.noisy and chain.used[i]


def gaussian(
    mean: Tensor, m0: Tensor, p0: Tensor, a: Tensor, complete: bool, settings: Settings
) -> Tuple[Tensor, Tensor]:
    """q_i of a weight: its chain's mean and 1 / a if the chain samples it; else Eq. 13's variance, and its mean too."""
    if complete:
        return mean, 1.0 / a
    own, variance = episode_posterior(m0, p0, mean, a)
    return mean if settings.prior_in_chain else own, variance


def posterior(
    chain: Chain, prior: Prior, curvature: Curvature, settings: Settings, mean: Optional[Sequence[Tensor]] = None
) -> Tuple[List[Tensor], List[Tensor]]:
    """
    q_i's means and variances, as functions of L_0 and of `mean`, the chain's mean with the graph that it is to have; a
    constant if it is not given.
    """
    found = []
    for i, m_bar in enumerate(mean or [t.detach() for t in mean_of(chain)[0]]):
        a = chain_precision(chain, i, prior, curvature, settings)
        complete = samples_posterior(chain, i, curvature, settings)
        found.append(gaussian(m_bar, prior.m0[i], prior.precision(i), a, complete, settings))
    return [m for m, _ in found], [v for _, v in found]


def draw_network(
    chain: Chain, m_bar: Sequence[Tensor], prior: Prior, curvature: Curvature, settings: Settings
) -> List[Tensor]:
    """
    **Description**

    The network that a query runs in closed form, a function of L_0 and of the chain's mean.

    **Arguments**

    * **m_bar** (list) - The chain's mean, with the graph that it is to have.
    """
    drawn = []
    for i, own in enumerate(m_bar):
        a = chain_precision(chain, i, prior, curvature, settings)
        deviation = curvature.deviation(chain, i, a).detach()
        drawn.append(draw(prior.m0[i], prior.precision(i), own, a, deviation).to(own.dtype))
    return drawn
