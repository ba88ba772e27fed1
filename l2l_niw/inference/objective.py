"""The episode's objective f_i + g_i / 2 (Eq. 14), and the expected KL in it (Eq. 10)."""

from typing import Sequence, Tuple, Union

import torch
from torch import Tensor

from l2l_niw.inference.prior import Prior
from l2l_niw.inference.wishart import log_determinant_gap


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
    not knowing Sigma costs. Of several episodes each one's, (B,).
    """
    lead = q[0][0].dim() - prior.log_variance[0].dim()
    columns = zip(*q, prior.m0, [prior.precision(i) for i in range(len(prior.m0))])
    summands = torch.stack(
        [kl_to_mode(*column).reshape(q[0][0].shape[:lead] + (-1,)).sum(-1) for column in columns]
    ).sum(0)
    return 0.5 * (summands + log_determinant_gap(prior.n0, prior.d, prior.wishart).to(summands.dtype))
