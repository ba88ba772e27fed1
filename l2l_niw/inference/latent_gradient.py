"""How the gradient of an episode's objective reaches L_0 where its posterior has its full covariance."""

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from l2l_niw.inference.meta_gradient import Tag


class State:
    """
    **Description**

    An episode's z, and the free energy that is added to the query's loss. With second_order='last_step' the graph of
    the step that led there is kept beside that of the forwards, so that it can be let go when the next step has been
    taken.

    **Arguments**

    * **z** (Tensor) - With the graph of the step that led to it.
    * **energy** (Tensor) - A scalar, or None.
    * **leaves** (list) - What they depend on.
    * **beside** (bool, *optional*, default=False) - Whether their graph is kept beside.
    * **others** (sequence, *optional*, default=()) - What else of the step has its graph beside.
    * **before** (State, *optional*, default=None) - Where the step began, which is a constant to a graph kept beside.
    """

    def __init__(
        self,
        z: Tensor,
        energy: Optional[Tensor],
        leaves: List[Tensor],
        beside: bool = False,
        others: Sequence[Tensor] = (),
        before: Optional["State"] = None,
    ):
        self.z: Optional[Tensor] = z
        self.energy, self.leaves, self.beside, self.others, self.before = energy, leaves, beside, others, before
        self.constant = False  # while the graph of the step that began here is gone through
        self.spent = False  # whether a back-propagation came by, which frees what is between z and the weights
        self.tags: List[Tag] = []  # forwards at this state

    def coordinates(self) -> Tuple[Tensor, ...]:
        """z, from which a back-propagation reaches L_0 and the free energy, and the others."""
        own = (None, None) if self.beside else (self.z, self.energy)
        return Coordinates.apply(self, *own, *self.leaves)

    def examples(self) -> int:
        """The examples of the forwards behind the back-propagation under way, but for those that were stepped on."""
        task = torch._C._current_graph_task_id()
        return sum([tag.n for tag in self.tags if not tag.stepped_on and tag.is_behind(task)])

    def release(self) -> None:
        """Lets go of the graph, if it is kept beside."""
        if self.beside:
            self.z = self.energy = self.before = None
            self.others = ()


class Coordinates(torch.autograd.Function):
    """
    The identity on z. Where a query's loss is back-propagated, the gradient of the free energy over the query's
    examples is added, and every leaf has a gradient, if it is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, state: State, z: Optional[Tensor], energy: Optional[Tensor], *leaves: Tensor
    ) -> Tuple[Tensor, ...]:
        """The values of z and of the others."""
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tuple([t.detach().clone() for t in (state.z, *state.others)])  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, gradient: Optional[Tensor], *others: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        """The gradients of z, of the free energy and of all that L_0 is made of."""
        state, n = ctx.state, ctx.state.examples()
        if state.constant:
            return (None,) * (3 + len(state.leaves))
        state.spent = True
        found: List[Optional[Tensor]] = [torch.zeros_like(t) if n else None for t in state.leaves]
        share = torch.ones_like(state.energy) / n if n and state.energy is not None else None
        energy = state.energy
        state.energy = None if torch.is_grad_enabled() and n else energy  # it is in the gradient's own graph
        if not state.beside:
            return (None, gradient, share, *found)
        pairs = [(state.z, gradient), (energy, share), *zip(state.others, others)]
        pairs = [(end, g) for end, g in pairs if end is not None and g is not None and end.requires_grad]
        if pairs:
            options: Dict[str, Any] = {"create_graph": torch.is_grad_enabled(), "retain_graph": True}
            ends, given = zip(*pairs)
            with constant(state.before):
                own = torch.autograd.grad(ends, state.leaves, given, allow_unused=True, **options)
            found = [zero if g is None else g for zero, g in zip(found, own)]
        return (None, None, None, *found)


@contextmanager
def constant(state: Optional[State]) -> Iterator[None]:
    """Back-propagations end at a state, if there is one."""
    if state is None:
        yield
        return
    before, state.constant = state.constant, True
    try:
        yield
    finally:
        state.constant = before
