"""Functional contrastive learning: a neural process whose summaries tell tasks apart."""

from typing import Optional

import torch
from torch import Tensor

from l2l_niw.errors import ModelError
from l2l_niw.heads._summaries import CrossAttention
from l2l_niw.heads.base import Head
from l2l_niw.heads.neural_process import NeuralProcess
from l2l_niw.heads.predictions import Prediction
from l2l_niw.utils._checks import check_number


def nt_xent(views: Tensor, temperature: float) -> Tensor:
    """
    **Description**

    The normalised, temperature-scaled cross-entropy of SimCLR. With cosines s, the mean over all ordered pairs i, j of
    views of one task of

        -log exp(s_ij / t) / (exp(s_ij / t) + sum_k exp(s_ik / t)),  k over the views of all other tasks.

    **Arguments**

    * **views** (Tensor) - Of every task, two or more, (tasks, views, width).
    * **temperature** (float) - t.

    **References**

    1. Chen et al. 2020. "A Simple Framework for Contrastive Learning of Visual Representations." ICML.
    """
    tasks, each, _ = views.shape
    unit = torch.nn.functional.normalize(views, dim=-1).flatten(0, 1)
    cosines = unit @ unit.mT / temperature
    task = torch.arange(tasks, device=views.device).repeat_interleave(each)
    same = task.unsqueeze(0) == task.unsqueeze(1)
    others = cosines.masked_fill(same, -torch.inf).logsumexp(-1, keepdim=True)
    pairs = same & ~torch.eye(len(same), dtype=torch.bool, device=views.device)
    losses = torch.logaddexp(cosines, others) - cosines
    return torch.where(pairs, losses, 0.0).sum() / pairs.sum().clamp_min(1)


class FunctionalContrast(Head):
    """
    **Description**

    A neural process that predicts as it did; in training, where `query_y` is given, its loss has a contrastive penalty
    beside: what the encoder says of the support and what it says of the query are two views of one function, to be
    alike, and unlike those of the other tasks of the batch. With attention each query's own summary is a view. Of
    one task alone the penalty is 0.

    **Arguments**

    * **head** (CNP or ANP) - Without a latent path.
    * **weight** (float, *optional*, default=1.0) - Of the penalty.
    * **temperature** (float, *optional*, default=0.07) - That cosines are divided by.

    **References**

    1. Gao et al. 2022. "What Matters For Meta-Learning Vision Regression Tasks?" CVPR.

    **Example**

    ~~~python
    model = EpisodicModel(PoseEncoder(), FunctionalContrast(CNP(64, targets=2, aggregate='max')))
    model(x, y, x_query, y_query).loss(y_query).backward()  # of a batch of tasks: x is (tasks, shots, 1, 128, 128)
    ~~~
    """

    task = "regression"

    def __init__(self, head: NeuralProcess, weight: float = 1.0, temperature: float = 0.07):
        super().__init__()
        if not isinstance(head, NeuralProcess) or head.latent is not None:
            raise ModelError("head must be a CNP or an ANP with latent=False.")
        check_number("weight", weight, 0)
        check_number("temperature", temperature, 0, strict=True)
        self.head, self.weight, self.temperature = head, weight, temperature
        self.features = head.features

    def predict(self, support: Tensor, y: Tensor, query: Tensor, query_y: Optional[Tensor]) -> Prediction:
        """The head's prediction; `query_y` adds the penalty."""
        prediction = self.head.predict(support, y, query, None)
        if query_y is not None:
            prediction.penalty = self.weight * self.contrast(support, y, query, query_y)
        return prediction

    def contrast(self, support: Tensor, y: Tensor, query: Tensor, query_y: Tensor) -> Tensor:
        """The contrastive loss of a batch of tasks: features (..., n, d) and targets of support and query."""
        summary, encoder = self.head.summary, self.head.encoder
        pairs = encoder(torch.cat([support, y], -1))
        if isinstance(summary, CrossAttention):
            views = summary(pairs, support, query)
        else:
            assert summary is not None  # as there is no latent path
            query_pairs = encoder(torch.cat([query, query_y], -1))
            one = query[..., :1, :]  # a summary is the same for all queries
            views = torch.cat([summary(pairs, support, one), summary(query_pairs, query, one)], -2)
        return nt_xent(views.reshape(-1, *views.shape[-2:]), self.temperature)

    def targets(self, support_y: Tensor, ways: Optional[int]) -> Tensor:
        """The targets, as the head takes them."""
        return self.head.targets(support_y, ways)
