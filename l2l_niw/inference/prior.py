"""L_0 = (m_0, V_0, n_0), the parameters of q(phi), as an episode sees them."""

import math
from typing import List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from l2l_niw.inference.wishart import from_raw, mode_ratio
from l2l_niw.utils._functional import SMALL


class Prior(NamedTuple):
    """
    **Description**

    L_0 of the random weights as an episode sees it. V_0 is held relative to n_0, which grows without end as episodes
    come in: P_0 = n_0 / V_0 is what every closed form uses.

    * `names` - The weights' names.
    * `m0` - Their means, with a graph to the model's parameters.
    * `log_variance` - log(V_0 / n_0) = -log P_0, with a graph to the wrapper's.
    * `raw_n0` - The unconstrained scalar behind n_0.
    * `start` - P_0 at the start.
    * `wishart` - 'factorised' or 'full'.
    """

    names: Sequence[str]
    m0: List[Tensor]
    log_variance: List[Tensor]
    raw_n0: Tensor
    start: float
    wishart: str

    @property
    def d(self) -> int:
        """The number of random weights."""
        return sum(map(Tensor.numel, self.log_variance))

    @property
    def n0(self) -> Tensor:
        """n_0, within its domain whatever the unconstrained scalar."""
        return from_raw(self.raw_n0, self.wishart, self.d)

    def scale(self, i: int) -> Tensor:
        """D of one weight: its V_0 / n_0, relative to the start."""
        return self.start * torch.exp(self.log_variance[i])

    def precision(self, i: int) -> Tensor:
        """P_0 of one weight."""
        return torch.exp(-self.log_variance[i])

    @torch.no_grad()
    def mode(self) -> Tuple[List[Tensor], List[Tensor]]:
        """The mode phi* of q(phi) (Eq. 17): mean and variance of the weights of a new task."""
        ratio = mode_ratio(self.n0, self.wishart, self.d)
        return [m.detach().clone() for m in self.m0], [v.exp() * ratio.to(v.dtype) for v in self.log_variance]


def init(
    names: Sequence[str],
    m0: Sequence[Tensor],
    log_variance: Sequence[Tensor],
    raw_n0: Tensor,
    initial_log_variance: float,
    wishart: str,
) -> Prior:
    """
    L_0 as it is now. What is written to the parameters later does not change it, but for large networks, whose
    parameters it takes as they are, so that nothing is held twice.
    """
    if sum([m.numel() for m in m0]) <= SMALL:
        m0, log_variance = [m.clone() for m in m0], [v.clone() for v in log_variance]
    return Prior(names, list(m0), list(log_variance), raw_n0.clone(), math.exp(-initial_log_variance), wishart)
