"""A from the variance of a Langevin chain's iterates (Sec. 3, "Quadratic approximation of episodic loss via SGLD")."""

import math
from typing import Optional

import torch
from torch import Tensor

from l2l_niw.inference.chain import Chain, iterate_variance, mean_of


class SGLD:
    """
    **Description**

    The paper's estimate: the precision of the chain's kept iterates. The chain is noisy, since its iterates' variance
    is all that speaks of curvature, and a chain at temperature T yields that of l_i / T.
    """

    noisy = True
    needs_outputs = False

    def precision(self, chain: Chain, i: int, scale: Optional[Tensor], temperature: float) -> Tensor:
        """The precision of some weights' iterates; infinite at T = 0, where exp(-l_i / T) is a spike."""
        if temperature == 0:
            return torch.full_like(chain.theta[i], math.inf)
        return iterate_variance(chain, i, scale).reciprocal()

    def deviation(self, chain: Chain, i: int, a: Tensor) -> Tensor:
        """The chain's own deviation from its mean stands for the posterior's."""
        return chain.theta[i] - mean_of(chain)[0][i]
