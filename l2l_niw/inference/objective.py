"""The episode's objective f_i + g_i / 2 (Eq. 14), the expected KL in it (Eq. 10), and how both reach L_0."""

from typing import List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from l2l_niw.inference.chain import Chain, Settings
from l2l_niw.inference.curvature import Curvature
from l2l_niw.inference.functional import in_blocks
from l2l_niw.inference.posterior import chain_precision, gaussian, samples_posterior
from l2l_niw.inference.prior import Prior
from l2l_niw.inference.wishart import gap_gradient, log_determinant_gap

SMALL = 2**16  # weights: below, operations are so short that one on all weights is faster than one per tensor
Gradients = List[Optional[Tensor]]


def objective(loss: Tensor, kl: Union[float, Tensor], kl_weight: float, n: float) -> Tensor:
    """
    **Description**

    Eq. 14 for one episode, in units of the mean query loss over n examples: f_i, the query loss of a network drawn
    from q_i, plus g_i / 2, up to its constant the expected KL, of weight w:

    $$f_i + \\tfrac12 g_i = loss(\\theta)
    + \\frac{w}{n}\\, \\mathbb{E}_{q(\\phi)} KL(q_i(\\theta) || p(\\theta|\\phi)).$$
    """
    return loss + kl_weight / n * kl


def kl_to_mode(mean: Tensor, variance: Tensor, m0: Tensor, p0: Tensor) -> Tensor:
    """Twice the KL of N(mean, variance) to N(m_0, 1 / P_0), weight by weight; each summand is non-negative."""
    ratio = p0 * variance
    return ratio - 1.0 - torch.log(ratio) + p0 * (mean - m0).square()


def expected_kl(q: Tuple[Sequence[Tensor], Sequence[Tensor]], prior: Prior) -> Tensor:
    """
    **Description**

    \\(\\mathbb{E}_{q(\\phi)} KL(q_i(\\theta) || p(\\theta|\\phi))\\) for l_0 infinite (the supplement's
    closed form, also half of g_i up to its constant), written as the KL to N(m_0, 1 / P_0) plus what
    not knowing Sigma costs. Of several episodes, the sum.
    """
    columns = *q, prior.m0, [prior.precision(i) for i in range(len(prior.m0))]
    if prior.d <= SMALL:
        columns = tuple([flat(column, prior.scale)] for column in columns)
    summands = torch.stack([kl_to_mode(*column).sum() for column in zip(*columns)]).sum()
    episodes = q[0][0].numel() // max(prior.scale[0].numel(), 1)
    gap = log_determinant_gap(prior.n0, prior.d, prior.wishart)
    return 0.5 * (summands + episodes * gap.to(summands.dtype))


def flat(tensors: Sequence[Tensor], shapes: Sequence[Tensor]) -> Tensor:
    """Few weights as one vector, or as one for each of several episodes."""
    return torch.cat([t.reshape(*t.shape[: t.dim() - like.dim()], -1) for t, like in zip(tensors, shapes)], -1)


@torch.no_grad()
def constant_kl_gradient(
    mean: List[Tensor], m0: List[Tensor], scale: List[Tensor], a: List[Tensor], start: float, weight: float
) -> Tuple[List[Tensor], List[Tensor]]:
    """
    The gradient of weight * KL in q_i's mean, and so with the other sign in m_0, and in log V_0, where q_i's precision
    a is a constant. By hand: autograd takes 0.43 instead of 0.07 ms on an MLP 40-40, and twice as long on 10 million
    weights (one core).
    """

    def on_lists(mean, m0, scale, a):
        p0 = torch._foreach_mul(torch._foreach_reciprocal(scale), start)
        distance = torch._foreach_sub(mean, m0)
        in_mean = torch._foreach_mul(distance, p0)
        twice = torch._foreach_addcmul(torch._foreach_div(p0, a), in_mean, distance)
        in_variance = torch._foreach_mul(torch._foreach_sub(twice, 1.0), -0.5 * weight)
        return torch._foreach_mul(in_mean, weight), in_variance

    return tuple(in_blocks(on_lists, (mean, m0, scale, a)))


class Episode:
    """
    **Description**

    What `Iterates` needs of an episode's state. Graphs that outlive the state hold this object, so that `release` frees
    what it holds.

    **Arguments**

    * **mean**, **center**, **slope** (list) - Iterates, the last ones or their means, and as in `Chain` what they move
        with and how.
    * **constant** (sequence) - The weights whose iterates have no graph of their own.
    * **chain**, **prior**, **curvature**, **settings** - From which q_i follows, with this mean.
    * **kl_weight** (float, *optional*, default=0.0) - Weight of the KL; 0 for none.
    """

    def __init__(
        self,
        mean: List[Tensor],
        center: List[Tensor],
        slope: Gradients,
        constant: Sequence[int],
        chain: Chain,
        prior: Prior,
        curvature: Curvature,
        settings: Settings,
        kl_weight: float = 0.0,
    ):
        self.mean, self.center, self.slope, self.constant, self.chain = mean, center, slope, constant, chain
        self.prior, self.curvature, self.settings, self.kl_weight = prior, curvature, settings, kl_weight
        self.rooted = {i for i in constant if center[i] is prior.m0[i]}  # whose iterates move with m_0 itself
        self.released = False
        self.in_graph = False  # whether the KL is in a gradient that is differentiated again

    def release(self) -> None:
        self.released = self.in_graph = True
        self.mean, self.center, self.slope, self.chain = [], [], [], None

    def follow(self) -> Tuple[List[Tensor], Tensor]:
        """The iterates as functions of L_0, and the KL's carrier."""
        moving, prior = list(self.mean), self.prior
        values = [self.mean[i].detach() for i in self.constant]
        for i in self.constant:
            moving[i] = self.center[i]
        *found, carrier = Iterates.apply(self, values, *moving, *prior.m0, *prior.log_variance, prior.raw_n0)
        iterates = list(self.mean)
        for i, t in zip(self.constant, found):
            iterates[i] = t
        return iterates, carrier

    def kl_gradient(self, part: Sequence[int], weight: float) -> Tuple[Sequence[Tensor], ...]:
        """The gradient of weight * KL in the mean, m_0 and log V_0 of these weights."""
        own, m0, scale = ([column[i] for i in part] for column in (self.mean, self.prior.m0, self.prior.scale))
        if torch.is_grad_enabled():  # to be differentiated again: each on its own, and means that move
            own = [self._moving(i) if i in self.constant else t for i, t in zip(part, own)]
            own, m0, scale = ([t.view_as(t) for t in column] for column in (own, m0, scale))
        a = chain_precision(self.chain, part, self.prior, self.curvature, self.settings)
        complete, twice = samples_posterior(self.chain, part[0], self.curvature, self.settings), torch.is_grad_enabled()
        if complete and not twice:
            in_mean, in_variance = constant_kl_gradient(own, m0, scale, a, self.prior.start, weight)
            return in_mean, [None if i in self.rooted else -g for i, g in zip(part, in_mean)], in_variance
        count, total = len(part), 0.0
        leaves = [t if twice and t.requires_grad else t.detach().requires_grad_() for t in (*own, *m0, *scale)]
        own, m0, scale = leaves[:count], leaves[count : 2 * count], leaves[2 * count :]
        with torch.enable_grad():
            for columns in zip(own, m0, [self.prior.start / s for s in scale], a):
                q = gaussian(*columns, complete, self.settings)
                total = total + 0.5 * weight * kl_to_mode(*q, *columns[1:3]).sum()
        found = torch.autograd.grad(total, leaves, create_graph=twice, allow_unused=True, materialize_grads=True)
        return found[:count], found[count : 2 * count], [g * s for g, s in zip(found[2 * count :], scale)]

    def _moving(self, i: int) -> Tensor:
        """An iterate without a graph of its own, written out as the function of L_0 that it is."""
        center, log_variance, slope = self.center[i], self.prior.log_variance[i], self.slope[i]
        moved = self.mean[i].detach() + (center - center.detach())
        return moved if slope is None else moved + slope * (log_variance - log_variance.detach())

    def groups(self) -> List[Sequence[int]]:
        """Weights that are worked on at a time: all if they are few, else one tensor, so that little is held."""
        every = range(len(self.prior.m0))
        together = self.chain is not None and all(self.chain.used) and self.prior.d <= SMALL
        return [every] if together else [(i,) for i in every]


class Iterates(torch.autograd.Function):
    """
    **Description**

    Iterates without a graph of their own as functions of L_0: they move with their centers, and by their slopes with
    log V_0. The last output is zero, the carrier of the KL: for its gradient it is given n, the number of examples
    behind a loss, and adds the gradient of kl_weight * KL / n. Then every parameter gets a gradient, if it is 0.

    **Arguments**

    * **episode** (Episode) - The state.
    * **values** (list) - The iterates.
    * **leaves** (list) - For each weight what its iterates move with, m_0, log V_0, and then n_0.
    """

    @staticmethod
    def forward(ctx, episode: Episode, values: List[Tensor], *leaves: Tensor) -> Tuple[Tensor, ...]:
        ctx.episode = episode
        ctx.set_materialize_grads(False)
        return (*values, torch.zeros(2))

    @staticmethod
    def backward(ctx, *gradients: Optional[Tensor]):
        episode, prior, n, count = ctx.episode, ctx.episode.prior, gradients[-1], len(ctx.episode.prior.m0)
        if all([g is None for g in gradients]):  # what comes back is for the last layer's earlier weights alone
            return (None,) * (3 * count + 3)
        moving, in_m0, in_variance = ([None] * count for _ in range(3))
        upstream = dict(zip(episode.constant, gradients))
        weight = episode.kl_weight / n.max().item() if n is not None and not episode.in_graph else 0.0
        episode.in_graph = episode.in_graph or bool(weight) and torch.is_grad_enabled()
        for part in episode.groups():
            kl = episode.kl_gradient(part, weight) if weight else [[None] * len(part)] * 3
            for i, *found in zip(part, *kl):
                in_mean, in_m0[i], in_variance[i] = found
                moving[i] = total = add(upstream.get(i), in_mean)
                if i in episode.rooted:  # the mean moves with m_0, and their distance stays
                    moving[i], in_m0[i] = upstream[i], None
                slope = None if episode.released else episode.slope[i]
                if i in upstream and total is not None and slope is not None:
                    by_slope = total * slope if in_variance[i] is None else torch.addcmul(in_variance[i], total, slope)
                    in_variance[i] = by_slope
                if n is not None and moving[i] is None and in_m0[i] is None:
                    in_m0[i] = torch.zeros_like(prior.m0[i])
                if n is not None and in_variance[i] is None:
                    in_variance[i] = torch.zeros_like(prior.log_variance[i])
        in_n0 = None
        if n is not None:
            in_n0 = torch.zeros_like(prior.raw_n0)
            if weight:
                in_n0 = 0.5 * weight * gap_gradient(prior.raw_n0, prior.d, prior.wishart)
        return (None, None, *moving, *in_m0, *in_variance, in_n0)


def add(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    """The sum of two gradients, either of which may be missing."""
    return b if a is None else a if b is None else a + b


class Tag:
    """What `Tagged` knows of a forward: its number of examples, and whether a step was taken on its loss."""

    def __init__(self, found: List["Tag"]):
        self.n, self.stepped_on = 1, False
        self.found = found  # tags that a back-propagation came by; not more, or graph and tag would hold each other


class Tagged(torch.autograd.Function):
    """
    **Description**

    Some weights of one forward: the identity, which tells when a loss is back-propagated through this forward. It is
    then added to `tag.found`, and `carrier` gets the forward's number of examples for a gradient, so that autograd
    sums them over the forwards behind a loss. A forward's weights may come in two parts, 0 and 1, which are counted
    apart: a loss depends on both, or on one of them.
    """

    @staticmethod
    def forward(ctx, tag: Tag, part: int, carrier: Tensor, *weights: Tensor) -> Tuple[Tensor, ...]:
        ctx.tag, ctx.part = tag, part
        ctx.set_materialize_grads(False)
        return tuple([w.view_as(w) for w in weights])

    @staticmethod
    def backward(ctx, *gradients: Optional[Tensor]):
        tag = ctx.tag
        if tag not in tag.found:
            tag.found.append(tag)
        n = None
        if ctx.needs_input_grad[2] and not tag.stepped_on:
            n = torch.tensor([0.0, tag.n] if ctx.part else [tag.n, 0.0])
        return (None, None, n, *gradients)
