"""L_0 = (m_0, V_0, n_0), the parameters of q(phi), as an episode sees them."""

import math
from typing import List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from l2l_niw.inference.wishart import from_raw, mode_ratio


class Prior(NamedTuple):
    """
    **Description**

    L_0 of the random weights at the time when an episode began. V_0 is held relative to n_0, which grows without end as
    episodes come in: P_0 = n_0 / V_0 is what every closed form uses.

    * `names` - The weights' names.
    * `m0` - Their means, with a graph to the model's parameters.
    * `log_variance` - The wrapper's log(V_0 / n_0) = -log P_0. Gradients go there; values are those of `scale`.
    * `raw_n0` - The unconstrained scalar behind n_0.
    * `scale` - D, the V_0 / n_0 of each weight relative to the start.
    * `start` - P_0 at the start.
    * `wishart` - 'factorised' or 'full'.
    """

    names: List[str]
    m0: List[Tensor]
    log_variance: List[Tensor]
    raw_n0: Tensor
    scale: List[Tensor]
    start: float
    wishart: str

    @property
    def d(self) -> int:
        return sum(map(Tensor.numel, self.scale))

    @property
    def n0(self) -> Tensor:
        """n_0, within its domain whatever the unconstrained scalar."""
        return from_raw(self.raw_n0, self.wishart, self.d)

    def precision(self, i: int) -> Tensor:
        """P_0 of one weight."""
        return self.start / self.scale[i]

    @torch.no_grad()
    def mode(self) -> Tuple[List[Tensor], List[Tensor]]:
        """The mode phi* of q(phi) (Eq. 17): mean and variance of the weights of a new task."""
        ratio = mode_ratio(self.n0, self.wishart, self.d)
        return [m.detach() for m in self.m0], [d / self.start * ratio.to(d.dtype) for d in self.scale]


def init(
    names: Sequence[str],
    m0: Sequence[Tensor],
    log_variance: Sequence[Tensor],
    raw_n0: Tensor,
    initial_log_variance: float,
    wishart: str,
) -> Prior:
    """L_0 as it is now: what is written to the parameters later does not change it."""
    scale = [torch.exp(v - initial_log_variance) for v in log_variance]  # whose graph keeps no parameter's value
    copies = [m.clone() for m in m0]
    return Prior(names, copies, log_variance, raw_n0.clone(), scale, math.exp(-initial_log_variance), wishart)
