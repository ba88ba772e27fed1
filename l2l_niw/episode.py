"""What a chain has told after one of its steps, and q_i, a draw from it and its KL as functions of L_0."""

from functools import cached_property
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from l2l_niw.chain import Chain
from l2l_niw.checks import check_degrees, check_sound
from l2l_niw.closed_form import adapted_share, draw, episode_posterior, expected_kl
from l2l_niw.options import Options
from l2l_niw.prior import FlatPrior, Prior
from l2l_niw.weights import Layout
from l2l_niw.wishart import gap_slope


def chain_precision(
    options: Options,
    layout: Layout,
    chain: Chain,
    observed: Optional[Tensor],
    used: Sequence[bool],
    variance: float,
    scale: Optional[Tensor],
) -> Tensor:
    """A before it is clamped; 0 for parameters that the losses did not depend on."""
    pseudo = variance if scale is None else variance * scale
    a = options.curvature.precision(chain, observed, pseudo, options.temperature)
    return a if all(used) else layout.keep(a, torch.zeros_like(a), used)


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


@torch.no_grad()
def pull_back(
    options: Options,
    prior: Prior,
    flat: FlatPrior,
    m_bar: Tensor,
    a: Tensor,
    offset: Tensor,
    gradient: Tensor,
    kl_weight: float,
) -> FlatPrior:
    """
    What L_0 gets for a gradient in the draw, and for kl_weight times the KL: the derivatives of `draw_network` and
    of `kl_to_prior` written out, so that one pass over the weights serves both.
    """
    p0 = flat.p0
    share = adapted_share(a, p0)
    rest = p0 / a * share
    distance = m_bar - flat.m0
    moved, deviation = share * distance, share.sqrt() * offset
    slope = torch.add(moved, deviation, alpha=0.5).mul_(rest)  # of the share, in log(V_0 / n_0)
    if options.trace == "first" and options.precondition:
        slope += moved + deviation if options.curvature.noisy else moved  # of the steps
    g_m0 = gradient if options.trace == "first" else gradient * rest
    g_log_variance = slope.mul_(gradient)
    if not kl_weight:
        return FlatPrior(g_m0, g_log_variance, torch.zeros_like(flat.raw_n0))
    pull = moved.mul_(share).mul_(p0)
    g_log_variance.add_((rest.sub_(share).mul_(pull).mul_(distance)).addcmul_(share, share), alpha=0.5 * kl_weight)
    weight = 0.5 * kl_weight * gradient[..., 0].numel()  # n_0 is the same in every one of several episodes
    g_raw = weight * gap_slope(flat.raw_n0, gradient.shape[-1], prior.wishart).to(flat.raw_n0.dtype)
    return FlatPrior(g_m0.sub(pull, alpha=kl_weight), g_log_variance, g_raw)


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
    * **n** (int) - The number of data behind the step's loss.
    * **variance** (float) - What one step's noise adds,
    * **scale** (Tensor) - times this, weight by weight, if not None.
    * **sound** (Tensor, *optional*, default=None) - Whether all went well, where that has not been looked at yet.
    """

    def __init__(
        self,
        prior: Prior,
        chain: Chain,
        options: Options,
        observed: Optional[Tensor],
        used: Sequence[bool],
        n: int,
        variance: float,
        scale: Optional[Tensor],
        sound: Optional[Tensor] = None,
    ):
        self.prior, self.chain, self.options = prior, chain, options
        self.observed, self.used = observed, used
        self.variance, self.scale, self.sound = variance, scale, sound
        self.kl_pending = options.auto_kl and options.kl_weight > 0
        self.query_n = n  # the learner sets it at each forward that follows

    @cached_property
    def raw_a(self) -> Tensor:
        """A before it is clamped. Whatever uses the chain comes through here first."""
        prior = self.prior
        if self.sound is not None:
            check_sound(self.sound)
            check_degrees(prior.flat.raw_n0, prior.wishart, prior.layout.d)
        with torch.inference_mode(False), torch.no_grad():
            return chain_precision(
                self.options, prior.layout, self.chain, self.observed, self.used, self.variance, self.scale
            )

    @cached_property
    def a(self) -> Tensor:
        with torch.inference_mode(False):
            return self.raw_a.clamp(*self.options.precision_range)

    @cached_property
    def offset(self) -> Tensor:
        with torch.inference_mode(False):
            return self.options.curvature.offset(self.chain, self.a)

    def posterior(self) -> Tuple[Tensor, Tensor]:
        return episode_posterior(self.prior.flat.m0, self.prior.flat.p0, self.chain.mean, self.a)

    def kl(self) -> Tensor:
        return kl_to_prior(self.prior, self.prior.flat, self.chain.mean, self.a)

    def draw(self) -> Tensor:
        return draw_network(self.options, self.prior.flat, self.chain.mean, self.a, self.offset)

    def weights(self, at_chain: bool) -> List[Tensor]:
        """The network that a forward runs: the chain's state or a draw from q_i; both reach L_0."""
        if self.options.trace == "full":
            return self.prior.layout.split(self.chain.theta if at_chain else self.draw())
        return list(EpisodeWeights.apply(self, at_chain, *self.prior.flat))


class EpisodeWeights(torch.autograd.Function):
    """
    **Description**

    A learner's weights as a function of L_0. Nothing but values is computed until a query loss is
    back-propagated; then one pass gives L_0 the gradient of that loss through a draw from q_i and,
    the first time, that of kl_weight * KL / n. At the chain's state, which equals the draw where the
    prior is flat, the gradient passes straight through to the draw's.
    """

    @staticmethod
    def forward(ctx, episode: Episode, at_chain: bool, *flat: Tensor) -> Tuple[Tensor, ...]:
        ctx.episode = episode
        m0, log_variance, _ = flat
        chain, layout = episode.chain, episode.prior.layout
        if at_chain:
            return tuple(layout.pieces(chain.theta))
        return tuple(layout.pieces(draw(m0, torch.exp(-log_variance), chain.mean, episode.a, episode.offset)))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        episode = ctx.episode
        options, prior, chain = episode.options, episode.prior, episode.chain
        kl_weight = options.kl_weight / episode.query_n if episode.kl_pending else 0.0
        episode.kl_pending = False
        gradient = prior.layout.flatten(gradients)
        found = pull_back(options, prior, prior.flat, chain.mean, episode.a, episode.offset, gradient, kl_weight)
        return (None, None, *found)


class ModelWeights(torch.autograd.Function):
    """The model's own parameters, m_0, before any step: V_0 and n_0 have no part, and a gradient of zero."""

    @staticmethod
    def forward(ctx, prior: Prior, *flat: Tensor) -> Tuple[Tensor, ...]:
        ctx.prior = prior
        return tuple(prior.layout.pieces(flat[0]))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        _, log_variance, raw_n0 = ctx.prior.flat
        return None, ctx.prior.layout.flatten(gradients), torch.zeros_like(log_variance), torch.zeros_like(raw_n0)
