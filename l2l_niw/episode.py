"""What a chain has told after one of its steps, and q_i, a draw from it and its KL as functions of L_0."""

from functools import cached_property
from typing import List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from l2l_niw.chain import Chain
from l2l_niw.closed_form import draw, episode_posterior, expected_kl
from l2l_niw.errors import LossError
from l2l_niw.options import Options
from l2l_niw.prior import FlatPrior, Prior
from l2l_niw.weights import Layout

Spread = Union[float, Tensor]


def chain_precision(
    options: Options, layout: Layout, chain: Chain, observed: Optional[Tensor], used: Sequence[bool], pseudo: Spread
) -> Tensor:
    """A before it is clamped; 0 for parameters that the losses did not depend on."""
    a = options.curvature.precision(chain, observed, pseudo, options.temperature)
    return layout.keep(a, torch.zeros_like(a), used)


def draw_network(options: Options, flat: FlatPrior, m_bar: Tensor, a: Tensor, offset: Tensor) -> Tensor:
    """
    A network from q_i. To first order the chain began at m_0 and took steps proportional to V_0, if
    preconditioned: the distance that it went keeps, or grows, as L_0 does.
    """
    if options.trace == "first":
        distance = m_bar - flat.m0.detach()
        if options.precondition:
            growth = torch.exp(flat.log_variance - flat.log_variance.detach())
            distance = distance * growth
            offset = offset * growth if options.curvature.noisy else offset
        m_bar = flat.m0 + distance
    return draw(flat.m0, flat.p0, m_bar, a, offset)


def kl_to_prior(prior: Prior, flat: FlatPrior, m_bar: Tensor, a: Tensor) -> Tensor:
    posterior = episode_posterior(flat.m0, flat.p0, m_bar, a)
    return expected_kl(*posterior, flat.m0, flat.p0, prior.degrees(flat.raw_n0), prior.wishart)


class Episode:
    """
    **Description**

    The chain's moments (m_bar, A), constants to L_0, and a deviation from m_bar. A and the deviation
    cost nothing until they are asked for. The chain may be several side by side, (B, d).

    **Arguments**

    * **prior** (Prior) - L_0's leaves.
    * **chain** (Chain) - The chain after its last step.
    * **options** (Options) - The wrapper's.
    * **observed** (Tensor) - What the curvature strategy saw, summed over the steps, if it looks.
    * **used** (list) - Which parameters the losses depended on; the others' A is the floor.
    * **pseudo** (float or Tensor) - The variance that one step's noise adds.
    * **n** (int) - The number of data behind the step's loss.
    """

    def __init__(
        self,
        prior: Prior,
        chain: Chain,
        options: Options,
        observed: Optional[Tensor],
        used: Sequence[bool],
        pseudo: Spread,
        n: int,
    ):
        self.prior, self.chain, self.options = prior, chain, options
        self.observed, self.used, self.pseudo = observed, used, pseudo
        self.kl_pending = options.auto_kl and options.kl_weight > 0
        self.query_n = n  # the learner sets it at each forward that follows

    @cached_property
    def raw_a(self) -> Tensor:
        """A before it is clamped."""
        with torch.inference_mode(False), torch.no_grad():
            return chain_precision(
                self.options, self.prior.layout, self.chain, self.observed, self.used, self.pseudo
            )

    @cached_property
    def a(self) -> Tensor:
        with torch.inference_mode(False):
            return self.raw_a.clamp(*self.options.precision_range)

    @cached_property
    def offset(self) -> Tensor:
        with torch.inference_mode(False):
            return self.options.curvature.offset(self.chain, self.a)

    def posterior(self, flat: FlatPrior) -> Tuple[Tensor, Tensor]:
        return episode_posterior(flat.m0, flat.p0, self.chain.mean, self.a)

    def kl(self, flat: FlatPrior) -> Tensor:
        return kl_to_prior(self.prior, flat, self.chain.mean, self.a)

    def draw(self, flat: FlatPrior) -> Tensor:
        return draw_network(self.options, flat, self.chain.mean, self.a, self.offset)

    def pull_back(self, gradient: Tensor, kl_weight: float) -> List[Tensor]:
        """What L_0's leaves get for a gradient in the draw, and for kl_weight times the KL, in one pass."""
        prior, layout = self.prior, self.prior.layout
        with torch.enable_grad():
            flat = FlatPrior(*(t.detach().requires_grad_() for t in prior.flat()))
            values, gradients = [self.draw(flat)], [gradient]
            if kl_weight:
                values.append(self.kl(flat))
                gradients.append(torch.full_like(values[1], kl_weight))
            g_m0, g_log_variance, g_raw = torch.autograd.grad(
                values, flat, gradients, allow_unused=True, materialize_grads=True
            )
        return [*layout.split(g_m0), *layout.split(g_log_variance, cast=False), g_raw]

    def weights(self, at_chain: bool) -> Tensor:
        """The network that a forward runs, flat: the chain's state or a draw from q_i; both reach L_0."""
        if self.options.trace == "full":
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
        ctx.episode, ctx.versions = episode, [leaf._version for leaf in leaves]
        return episode.chain.theta.detach() if at_chain else episode.draw(episode.prior.flatten(leaves))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        episode = ctx.episode
        # not save_for_backward: a query in parts comes through here once a part
        if ctx.versions != [leaf._version for leaf in episode.prior.leaves]:
            raise LossError("backward: the model's parameters were changed since the query's forward; take optimiser "
                            "steps after backward only.")
        kl_weight = episode.options.kl_weight / episode.query_n if episode.kl_pending else 0.0
        episode.kl_pending = False
        return (None, None, *episode.pull_back(gradient, kl_weight))


class ModelWeights(torch.autograd.Function):
    """The model's own parameters, m_0, before any step: V_0 and n_0 have no part, and a gradient of zero."""

    @staticmethod
    def forward(ctx, count: int, *leaves: Tensor) -> Tuple[Tensor, ...]:
        ctx.others = leaves[count:]
        return tuple(m0.clone() for m0 in leaves[:count])

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return (None, *gradients, *(torch.zeros_like(leaf) for leaf in ctx.others))
