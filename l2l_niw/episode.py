"""What a chain has told after one of its steps, and q_i, a draw from it and its KL as functions of L_0."""

from functools import cached_property
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from l2l_niw.chain import Chain
from l2l_niw.checks import check_degrees, check_sound
from l2l_niw.closed_form import adapted_share, draw, episode_posterior, expected_kl, posterior_slopes, slopes
from l2l_niw.options import Options
from l2l_niw.prior import FlatPrior, Prior
from l2l_niw.readout import Trace
from l2l_niw.vectors import copy_of
from l2l_niw.weights import Layout
from l2l_niw.wishart import gap_slope

BEGAN = ("first", "readout")  # traces by which the chain's mean moves with m_0


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
    a = options.curvature.precision(chain, observed, variance, scale, options.temperature)
    return a if all(used) else layout.keep(a, torch.zeros_like(a), used)


def draw_network(options: Options, flat: FlatPrior, m_bar: Tensor, a: Tensor, offset: Tensor) -> Tensor:
    """
    A network from q_i. To first order the chain began at m_0 and took steps proportional to V_0, if
    preconditioned: the distance that it went keeps, or grows, as L_0 does.
    """
    if options.trace in BEGAN:
        distance = m_bar - flat.m0.detach()
        if options.precondition:
            growth = torch.exp(flat.log_variance - flat.log_variance.detach())
            distance = distance * growth
            offset = offset * growth if options.curvature.noisy else offset
        m_bar = flat.m0 + distance
    return draw(flat.m0, flat.log_variance, m_bar, a, offset)


def kl_to_prior(prior: Prior, flat: FlatPrior, m_bar: Tensor, a: Tensor) -> Tensor:
    posterior = episode_posterior(flat.m0, flat.log_variance, m_bar, a)
    return expected_kl(*posterior, flat.m0, flat.log_variance, prior.degrees(flat.raw_n0), prior.wishart)


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
    of `kl_to_prior`, written out.
    """
    first = options.trace in BEGAN
    grew = first and options.precondition
    g_m0, g_log_variance = slopes(
        gradient, flat.m0, flat.log_variance, m_bar, a, offset, first, grew, options.curvature.noisy, kl_weight
    )
    if not kl_weight:
        return FlatPrior(g_m0, g_log_variance, torch.zeros_like(flat.raw_n0))
    weight = 0.5 * kl_weight * gradient[..., 0].numel()  # n_0 is the same in every one of several episodes
    g_raw = weight * gap_slope(flat.raw_n0, gradient.shape[-1], prior.wishart)
    return FlatPrior(g_m0, g_log_variance, g_raw.to(flat.raw_n0.dtype))


@torch.no_grad()
def add_readout(
    options: Options,
    prior: Prior,
    flat: FlatPrior,
    chain: Chain,
    a: Tensor,
    scale: Optional[Tensor],
    trace: Trace,
    gradient: Tensor,
    found: FlatPrior,
) -> None:
    """
    Adds to what `pull_back` has found, for a gradient in the draw, what the readout's iterates owe to L_0 beyond
    keeping their distance to m_0, or having it grow.
    """
    place, layout = trace.place, prior.layout
    vectors = (gradient, a, flat.m0, flat.log_variance, chain.theta, chain.mean)
    gradient, a, m0, log_variance, end, mean = (place.join(layout.split(t, cast=False)) for t in vectors)
    share = adapted_share(a, torch.exp(-log_variance))
    in_end = share.sqrt() * gradient if options.curvature.noisy else torch.zeros_like(gradient)
    in_mean = share * gradient - in_end
    sizes = None if scale is None else place.join(layout.split(scale, cast=False))
    in_start, in_sizes, in_features = trace.back(in_mean, in_end, chain.kept, end, sizes)
    more = [(found.m0, place.split(in_start - in_mean - in_end))]
    if sizes is not None:
        more.append((found.log_variance, place.split(in_sizes - in_mean * (mean - m0) - in_end * (end - m0))))
    if in_features is not None and trace.pull is not None:
        more.append((found.m0, [(i, g) for i, g in enumerate(trace.pull(in_features)) if g is not None]))
    for vector, parts in more:
        own = layout.split(vector, cast=False)
        for i, part in parts:
            own[i].add_(part)


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
    * **readout** (Trace, *optional*, default=None) - The readout's steps, if they are traced.
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
        readout: Optional[Trace] = None,
    ):
        self.prior, self.chain, self.options = prior, chain, options
        self.observed, self.used = observed, used
        self.variance, self.scale, self.sound, self.readout = variance, scale, sound, readout
        self.kl_pending = options.auto_kl and options.kl_weight > 0
        self.query_n = n  # the learner sets it at each forward that follows

    @torch.no_grad()
    def raw_a(self) -> Tensor:
        """A before it is clamped."""
        return chain_precision(
            self.options, self.prior.layout, self.chain, self.observed, self.used, self.variance, self.scale
        )

    @cached_property
    def a(self) -> Tensor:
        """Whatever uses the chain comes through here first."""
        prior = self.prior
        if self.sound is not None:
            check_sound(self.sound)
            check_degrees(prior.flat.raw_n0, prior.wishart, prior.layout.d)
        with torch.inference_mode(False):
            return self.raw_a().clamp_(*self.options.precision_range)

    @cached_property
    def offset(self) -> Tensor:
        with torch.inference_mode(False), torch.set_grad_enabled(self.options.trace == "full"):
            return self.options.curvature.offset(self.chain, self.a)

    def posterior(self) -> Tuple[Tensor, Tensor]:
        """q_i's mean and variance, as functions of L_0."""
        return EpisodePosterior.apply(self, *self.prior.flat)

    def kl(self) -> Tensor:
        return EpisodeKL.apply(self, *self.prior.flat)

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
        chain, layout = episode.chain, episode.prior.layout
        return tuple(layout.pieces(chain.theta if at_chain else draw(*flat[:2], chain.mean, episode.a, episode.offset)))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        episode = ctx.episode
        options, prior, chain = episode.options, episode.prior, episode.chain
        kl_weight = options.kl_weight / episode.query_n if episode.kl_pending else 0.0
        episode.kl_pending = False
        gradient = prior.layout.flatten(gradients)
        found = pull_back(options, prior, prior.flat, chain.mean, episode.a, episode.offset, gradient, kl_weight)
        if episode.readout is not None:
            add_readout(options, prior, prior.flat, chain, episode.a, episode.scale, episode.readout, gradient, found)
        return (None, None, *found)


class EpisodePosterior(torch.autograd.Function):
    """The mean and variance of q_i as functions of L_0; the chain's moments are constants."""

    @staticmethod
    def forward(ctx, episode: Episode, m0: Tensor, log_variance: Tensor, raw_n0: Tensor) -> Tuple[Tensor, Tensor]:
        ctx.episode = episode
        return episode_posterior(m0, log_variance, episode.chain.mean, episode.a)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_mean: Tensor, g_variance: Tensor):
        m0, log_variance, raw_n0 = ctx.episode.prior.flat
        found = posterior_slopes(g_mean, g_variance, m0, log_variance, ctx.episode.chain.mean, ctx.episode.a)
        return (None, *found, torch.zeros_like(raw_n0))


class EpisodeKL(torch.autograd.Function):
    """The expected KL of q_i as a function of L_0."""

    @staticmethod
    def forward(ctx, episode: Episode, *flat: Tensor) -> Tensor:
        ctx.episode = episode
        return kl_to_prior(episode.prior, FlatPrior(*flat), episode.chain.mean, episode.a)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        episode, prior = ctx.episode, ctx.episode.prior
        none = torch.zeros_like(episode.a)
        found = pull_back(episode.options, prior, prior.flat, episode.chain.mean, episode.a, none, none, 1.0)
        return (None, *(g.mul_(upstream) for g in found))


class ModelWeights(torch.autograd.Function):
    """The model's own parameters, m_0, before any step: V_0 and n_0 have no part, and a gradient of zero."""

    @staticmethod
    def forward(ctx, prior: Prior, *flat: Tensor) -> Tuple[Tensor, ...]:
        ctx.prior = prior
        return tuple(prior.layout.pieces(copy_of(flat[0])))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        _, log_variance, raw_n0 = ctx.prior.flat
        return None, ctx.prior.layout.flatten(gradients), torch.zeros_like(log_variance), torch.zeros_like(raw_n0)
