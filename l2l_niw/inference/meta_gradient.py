"""How the gradient of an episode's objective (Eq. 14) reaches L_0."""

from typing import Any, Collection, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from l2l_niw.inference.chain import Chain, Settings, follow, mean_of
from l2l_niw.inference.curvature import Curvature
from l2l_niw.inference.functional import arrays_in, in_blocks
from l2l_niw.inference.objective import SMALL, kl_to_mode
from l2l_niw.inference.posterior import chain_precision, gaussian, samples_posterior
from l2l_niw.inference.prior import Prior
from l2l_niw.inference.wishart import gap_gradient


class Tag:
    """
    One forward: its number of examples, whether a step was taken on its loss, and the newest back-propagation that came
    by its outputs.
    """

    def __init__(self, n: int, outputs: Any, others: Collection[int] = ()):
        self.n, self.stepped_on, self.task = n, False, None
        watched = [t for t in arrays_in(outputs) if isinstance(t, Tensor) and t.requires_grad and id(t) not in others]
        for tensor in watched:
            tensor.register_hook(self._note)
        self.watched = bool(watched)

    def _note(self, gradient: Tensor) -> None:
        self.task = torch._C._current_graph_task_id()

    def is_behind(self, task: Optional[int] = None) -> bool:
        """Whether a back-propagation, or any since the task was reset, came by; if that cannot be seen it did."""
        return not self.watched or self.task is not None and task in (None, self.task)


class State:
    """
    **Description**

    An episode's state as `Iterates` needs it. Graphs that outlive the state hold this object, so that `release` frees
    what it holds.

    **Arguments**

    * **iterates** (tuple) - Values, roots and slopes: the chain's last ones, or their means.
    * **chain**, **prior**, **curvature**, **settings** - From which q_i follows.
    * **kl_weight** (float, *optional*, default=0.0) - Weight of the KL; 0 for none.
    """

    def __init__(
        self,
        iterates: Tuple[List[Tensor], List[Tensor], List[Optional[Tensor]]],
        chain: Chain,
        prior: Prior,
        curvature: Curvature,
        settings: Settings,
        kl_weight: float = 0.0,
    ):
        self.values, self.root, self.slope = iterates
        self.chain, self.prior, self.curvature, self.settings = chain, prior, curvature, settings
        self.kl_weight = kl_weight
        self.tags: List[Tag] = []  # forwards at this state

    def weights(self) -> List[Tensor]:
        """The iterates as functions of L_0."""
        prior, root, mean = self.prior, self.root, mean_of(self.chain)[1]
        leaves = *prior.m0, *prior.log_variance, *root, *(() if mean is root else mean), prior.raw_n0
        return list(Iterates.apply(self, *leaves))

    def examples(self) -> int:
        """The examples of the forwards behind the back-propagation under way, but for those that were stepped on."""
        task = torch._C._current_graph_task_id()
        return sum([tag.n for tag in self.tags if not tag.stepped_on and tag.is_behind(task)])

    def release(self, kept: Collection[int]) -> None:
        """Lets go of all but what the gradients of kept weights need."""
        self.slope = [s if i in kept else None for i, s in enumerate(self.slope)]
        self.values, self.root, self.chain, self.kl_weight = [], [], None, 0.0

    def groups(self) -> List[Sequence[int]]:
        """Weights that are worked on at a time: all if they are few, else one tensor, so that little is held."""
        every = range(len(self.prior.m0))
        together = all(self.chain.used) and self.prior.d <= SMALL
        return [every] if together else [(i,) for i in every]

    def kl_gradient(self, part: Sequence[int], weight: float) -> Tuple[Sequence[Tensor], ...]:
        """The gradient of weight * KL in q_i's mean as the chain has it, in m_0 and in log V_0, of these weights."""
        prior, twice = self.prior, torch.is_grad_enabled()
        complete = samples_posterior(self.chain, part[0], self.curvature, self.settings)
        precisions = chain_precision(self.chain, part, prior, self.curvature, self.settings)
        mean = mean_of(self.chain)
        if complete and not twice:
            columns = [[column[i] for i in part] for column in (mean[0], prior.m0, prior.scale)]
            return in_blocks(complete_kl_gradient, (*columns, precisions, prior.start, weight), consumed=3)
        count, total = len(part), 0.0
        with torch.enable_grad():
            own = [[column[i] for i in part] for column in (*mean, prior.log_variance)]
            means = follow(*own[:3], own[3]) if twice else own[0]
            scales = [prior.scale[i].expand_as(prior.log_variance[i]) for i in part]
            leaves = [*means, *[prior.m0[i] for i in part], *scales]
            leaves = [t.view_as(t) if twice and t.requires_grad else t.detach().requires_grad_() for t in leaves]
            means, m0, scale = leaves[:count], leaves[count : 2 * count], leaves[2 * count :]
            for columns in zip(means, m0, [prior.start / s for s in scale], precisions):
                q = gaussian(*columns, complete, self.settings)
                total = total + 0.5 * weight * kl_to_mode(*q, *columns[1:3]).sum()
            found = torch.autograd.grad(total, leaves, create_graph=twice, allow_unused=True, materialize_grads=True)
            in_variance = [g * s for g, s in zip(found[2 * count :], scale)]
        return found[:count], found[count : 2 * count], in_variance


@torch.no_grad()
def complete_kl_gradient(
    mean: Sequence[Tensor],
    m0: Sequence[Tensor],
    scale: Sequence[Tensor],
    a: Sequence[Tensor],
    start: float,
    weight: float,
) -> Tuple[Sequence[Tensor], ...]:
    """
    The gradient of weight * KL in q_i's mean, m_0 and log V_0, where q_i's precision a is a constant. By hand: autograd
    takes 0.43 instead of 0.07 ms on an MLP 40-40, and twice as long on 10 million weights (one core).
    """
    p0 = torch._foreach_mul(torch._foreach_reciprocal(scale), start)
    distance = torch._foreach_sub(mean, m0)
    in_mean = torch._foreach_mul(distance, p0)
    twice = torch._foreach_addcmul(torch._foreach_div(p0, a), in_mean, distance)
    in_variance = torch._foreach_mul(torch._foreach_sub(twice, 1.0), -0.5 * weight)
    return torch._foreach_mul(in_mean, weight), torch._foreach_mul(in_mean, -weight), in_variance


class Iterates(torch.autograd.Function):
    """
    **Description**

    Iterates as functions of L_0: they move with their roots, and by their slopes with log V_0. Where a back-propagation
    came by forwards at this state that no step was taken on, the gradient of kl_weight * KL / n is added, n the
    examples of these forwards, and every parameter has a gradient, if it is 0.

    **Arguments**

    * **state** (State) - The state.
    * **leaves** (list) - For each weight m_0, log V_0, the root and, of several iterates, their mean's; then n_0.
    """

    @staticmethod
    def forward(ctx, state: State, *leaves: Tensor) -> Tuple[Tensor, ...]:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in state.values])

    @staticmethod
    def backward(ctx, *gradients: Optional[Tensor]):
        state, prior, count = ctx.state, ctx.state.prior, len(gradients)
        n = state.examples()
        in_root, in_m0, in_mean = list(gradients), [None] * count, [None] * count
        in_variance = [None if g is None or s is None else g * s for g, s in zip(gradients, state.slope)]
        in_n0 = torch.zeros_like(prior.raw_n0) if n else None
        if n and state.kl_weight:
            weight, mean = state.kl_weight / n, mean_of(state.chain)
            for part in state.groups():
                for i, *found in zip(part, *state.kl_gradient(part, weight)):
                    if mean[1][i] is not prior.m0[i]:  # else the mean moves with m_0, and their distance stays
                        in_mean[i], in_m0[i] = found[:2]
                    if mean[2][i] is not None:
                        found[2] = torch.addcmul(found[2], found[0], mean[2][i].to(found[2].dtype))
                    in_variance[i] = add(in_variance[i], found[2])
            episodes = state.chain.theta[0].numel() // max(prior.scale[0].numel(), 1)
            in_n0 = 0.5 * weight * episodes * gap_gradient(prior.raw_n0, prior.d, prior.wishart)
            state.kl_weight = 0.0 if torch.is_grad_enabled() else state.kl_weight  # it is in the gradient's own graph
        if len(ctx.needs_input_grad) == 3 * count + 2:
            in_root, in_mean = [add(a, b) for a, b in zip(in_root, in_mean)], []
        for i in range(count) if n else ():
            if in_root[i] is None and in_m0[i] is None:
                in_m0[i] = torch.zeros_like(prior.m0[i])
            if in_variance[i] is None:
                in_variance[i] = torch.zeros_like(prior.log_variance[i])
        return (None, *in_m0, *in_variance, *in_root, *in_mean, in_n0)


def add(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    """The sum of two gradients, either of which may be missing."""
    return b if a is None else a if b is None else a + b
