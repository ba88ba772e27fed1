"""L_0 = (m_0, V_0, n_0), the parameters of q(phi), as the leaves that an optimiser updates."""

from functools import cached_property
from typing import List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from l2l_niw import vectors
from l2l_niw.weights import Layout
from l2l_niw.wishart import from_raw, mode


class Flat(torch.autograd.Function):
    """Tensors as one large vector, with a graph to them."""

    @staticmethod
    def forward(ctx, layout: Layout, *leaves: Tensor) -> Tensor:
        ctx.layout = layout
        return layout.flatten(leaves)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return (None, *ctx.layout.split(gradient, cast=False))


class FlatPrior(NamedTuple):
    """L_0 as flat vectors, V_0 as log(V_0 / n_0), and n_0's unconstrained scalar."""

    m0: Tensor
    log_variance: Tensor
    raw_n0: Tensor

    @property
    def p0(self) -> Tensor:
        """P_0 = n_0 / V_0, the expected precision of a task's weights."""
        return torch.exp(-self.log_variance)


@vectors.blockwise
def growth(log_variance: Tensor, log_start: Tensor) -> Tensor:
    return torch.exp(log_variance - log_start)


class Prior:
    """
    **Description**

    The leaves behind L_0 for the weights of a layout: the model's parameters, one log(V_0 / n_0) a
    parameter, and the scalar that n_0 is computed from. Each learner has its own, whose vectors are of
    the time when it was cloned. V_0 is held relative to n_0, which grows without end as episodes come
    in: held by itself, it would have to run after n_0 to keep P_0.
    """

    def __init__(
        self,
        layout: Layout,
        wishart: str,
        m0: Sequence[Tensor],
        log_variance: Sequence[Tensor],
        raw_n0: Tensor,
        log_start: Tensor,
    ):
        self.layout, self.wishart, self.log_start = layout, wishart, log_start
        self.leaves: List[Tensor] = [*m0, *log_variance, raw_n0]

    @cached_property
    def flat(self) -> FlatPrior:
        """Flat vectors with a graph to the leaves, as they are when this is first asked for."""
        k, layout = len(self.layout.names), self.layout
        parts = self.leaves[:k], self.leaves[k:-1]
        with torch.inference_mode(False), torch.enable_grad():
            m0, log_variance = (
                Flat.apply(layout, *part) if layout.d > vectors.LARGE else layout.flatten(part) for part in parts
            )
            return FlatPrior(m0, log_variance, self.leaves[-1].clone())

    def growth(self) -> Tensor:
        """How many times its first value V_0 / n_0 is now, a factor for each weight."""
        with torch.inference_mode(False), torch.no_grad():
            return growth(self.flat.log_variance, self.log_start)

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "flat"}  # a graph cannot be copied, but made anew

    def degrees(self, raw_n0: Tensor) -> Tensor:
        """n_0, within its domain whatever the unconstrained scalar."""
        return from_raw(raw_n0, self.wishart, self.layout.d)

    @torch.no_grad()
    def mode(self) -> Tuple[Tensor, Tensor]:
        """The mode phi* of q(phi): mean and variance of the weights of a new task."""
        n0 = self.degrees(self.flat.raw_n0)
        log_v0 = self.flat.log_variance + torch.log(n0).to(self.flat.log_variance.dtype)
        return mode(self.flat.m0.detach(), log_v0, n0, self.wishart)
