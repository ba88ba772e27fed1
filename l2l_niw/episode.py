"""What a chain has told after one of its steps, and q_i, a draw from it and its KL as functions of L_0."""

from functools import cached_property
from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from l2l_niw.chain import Chain
from l2l_niw.closed_form import draw, episode_posterior, expected_kl
from l2l_niw.curvature import Curvature
from l2l_niw.prior import FlatPrior, Prior


class Episode:
    """
    **Description**

    The chain's moments (m_bar, A) and a deviation from m_bar. They are constants to L_0, except that
    m_bar may keep a trace of m_0. A and the deviation cost nothing until they are asked for.

    **Arguments**

    * **prior** (Prior) - L_0's leaves.
    * **chain** (Chain) - The chain after its last step.
    * **curvature** (SGLD or GGN) - Where A comes from.
    * **observed** (Tensor) - What that strategy saw, summed over the steps; None if it looks at iterates.
    * **used** (list) - Which parameters the losses depended on; the others' A is the floor.
    * **pseudo** (float) - The variance that one step's noise adds.
    * **temperature** (float) - The chain's temperature.
    * **precision_range** (tuple) - Floor and ceiling of A.
    * **trace** (str) - How m_bar depends on m_0.
    * **kl_weight** (float) - Weight of the KL whose gradient a query loss brings along; 0 for none.
    """

    def __init__(
        self,
        prior: Prior,
        chain: Chain,
        curvature: Curvature,
        observed: Optional[Tensor],
        used: Sequence[bool],
        pseudo: float,
        temperature: float,
        precision_range: Tuple[float, float],
        trace: str,
        kl_weight: float,
    ):
        self.prior, self.chain, self.curvature = prior, chain, curvature
        self.observed, self.used = observed, used
        self.pseudo, self.temperature, self.precision_range = pseudo, temperature, precision_range
        self.trace, self.kl_weight = trace, kl_weight
        self.query_n = 1  # data behind the query loss: the learner sets it at each forward

    @cached_property
    def raw_a(self) -> Tensor:
        """A before it is clamped."""
        with torch.no_grad():
            a = self.curvature.precision(self.chain, self.observed, self.pseudo, self.temperature)
            if all(self.used):
                return a
            parts = zip(a.split(self.prior.layout.sizes), self.used)
            return torch.cat([part if used else torch.zeros_like(part) for part, used in parts])

    @cached_property
    def a(self) -> Tensor:
        return self.raw_a.clamp(*self.precision_range)

    @cached_property
    def offset(self) -> Tensor:
        return self.curvature.offset(self.chain, self.a)

    def m_bar(self, m0: Tensor) -> Tensor:
        """The chain's mean: constant, at a constant distance from m_0, or with the steps' own graph."""
        return self.chain.mean + (m0 - m0.detach()) if self.trace == "first" else self.chain.mean

    def draw(self, flat: FlatPrior) -> Tensor:
        return draw(flat.m0, flat.p0, self.m_bar(flat.m0), self.a, self.offset)

    def posterior(self, flat: FlatPrior) -> Tuple[Tensor, Tensor]:
        return episode_posterior(flat.m0, flat.p0, self.m_bar(flat.m0), self.a)

    def kl(self, flat: FlatPrior) -> Tensor:
        n0 = self.prior.degrees(flat.raw_n0)
        return expected_kl(*self.posterior(flat), flat.m0, flat.p0, n0, self.prior.wishart)

    def weights(self, at_chain: bool) -> Tensor:
        """The network that a forward runs, flat: the chain's state, or a draw from q_i; both reach L_0."""
        if self.trace == "full":
            return self.chain.theta if at_chain else self.draw(self.prior.flat())
        return EpisodeWeights.apply(self, at_chain, *self.prior.leaves)


class EpisodeWeights(torch.autograd.Function):
    """
    **Description**

    A learner's weights as a function of L_0. Nothing but values is computed until a query loss is
    back-propagated; then one pass gives L_0 the gradient of that loss through a draw from q_i and,
    the first time, that of kl_weight * KL / n. At the chain's state, which equals the draw where the
    prior is flat, the gradient passes straight through to the draw's.
    """

    @staticmethod
    def forward(ctx, episode: Episode, at_chain: bool, *leaves: Tensor) -> Tensor:
        ctx.episode = episode
        return episode.chain.theta.detach() if at_chain else episode.draw(episode.prior.flat())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        episode = ctx.episode
        prior = episode.prior
        with torch.enable_grad():
            flat = FlatPrior(*(t.detach().requires_grad_() for t in prior.flat()))
            values, gradients = [episode.draw(flat)], [gradient]
            if episode.kl_weight:
                values.append(episode.kl(flat))
                gradients.append(torch.full_like(values[1], episode.kl_weight / episode.query_n))
                episode.kl_weight = 0.0
            g_m0, g_log_variance, g_raw = torch.autograd.grad(
                values, flat, gradients, allow_unused=True, materialize_grads=True
            )
        split = prior.layout.split
        return (None, None, *split(g_m0), *split(g_log_variance), g_raw)
