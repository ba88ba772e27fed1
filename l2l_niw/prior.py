"""L_0 = (m_0, V_0, n_0), the parameters of q(phi), as the leaves that an optimiser updates."""

from typing import List, NamedTuple, Sequence

from torch import Tensor

from l2l_niw.closed_form import prior_precision
from l2l_niw.weights import Layout
from l2l_niw.wishart import from_raw


class FlatPrior(NamedTuple):
    """L_0 as flat vectors, and n_0's unconstrained scalar."""

    m0: Tensor
    log_v0: Tensor
    raw_n0: Tensor


class Prior:
    """
    **Description**

    The leaves behind L_0 for the weights of a layout: the model's parameters, one log V_0 a
    parameter, and the scalar that n_0 is computed from.
    """

    def __init__(self, layout: Layout, wishart: str, m0: Sequence[Tensor], log_v0: Sequence[Tensor], raw_n0: Tensor):
        self.layout, self.wishart = layout, wishart
        self.leaves: List[Tensor] = [*m0, *log_v0, raw_n0]

    def flat(self) -> FlatPrior:
        """Flat vectors with a graph to the leaves."""
        k = len(self.layout.names)
        flatten = self.layout.flatten
        return FlatPrior(flatten(self.leaves[:k]), flatten(self.leaves[k:-1]), self.leaves[-1])

    def degrees(self, raw_n0: Tensor) -> Tensor:
        """n_0, within its domain whatever the unconstrained scalar."""
        return from_raw(raw_n0, self.wishart, self.layout.d)

    def precision(self, flat: FlatPrior) -> Tensor:
        """P_0 = n_0 / V_0."""
        return prior_precision(flat.log_v0, self.degrees(flat.raw_n0))
