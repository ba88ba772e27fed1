"""L_0 = (m_0, V_0, n_0), the parameters of q(phi), as tensors."""

from typing import List, NamedTuple, Tuple

import torch
from torch import Tensor

from l2l_niw.inference.wishart import from_raw, mode_ratio


class Prior(NamedTuple):
    """
    **Description**

    L_0 of the random weights. V_0 is held relative to n_0, which grows without end as episodes come in: held by itself,
    it would have to run after n_0 to keep P_0 = n_0 / V_0, the precision that every closed form uses.

    * `names` - The weights' names.
    * `m0` - Their means: the model's own parameters.
    * `log_variance` - log(V_0 / n_0) = -log P_0, of the same shapes.
    * `raw_n0` - The unconstrained scalar behind n_0.
    * `initial_log_variance` - What log_variance was at the start.
    * `wishart` - 'factorised' or 'full'.
    """

    names: List[str]
    m0: List[Tensor]
    log_variance: List[Tensor]
    raw_n0: Tensor
    initial_log_variance: float
    wishart: str

    @property
    def d(self) -> int:
        return sum(map(Tensor.numel, self.m0))

    @property
    def n0(self) -> Tensor:
        """n_0, within its domain whatever the unconstrained scalar."""
        return from_raw(self.raw_n0, self.wishart, self.d)

    def step_scale(self, i: int) -> Tensor:
        """D, by which a weight's inner steps have grown with its V_0 / n_0 since the start."""
        return torch.exp(self.log_variance[i] - self.initial_log_variance).to(self.m0[i].dtype)

    @torch.no_grad()
    def mode(self) -> Tuple[List[Tensor], List[Tensor]]:
        """The mode phi* of q(phi) (Eq. 17): mean and variance of the weights of a new task."""
        ratio = mode_ratio(self.n0, self.wishart, self.d)
        return [m.detach() for m in self.m0], [v.exp() * ratio.to(v.dtype) for v in self.log_variance]
