"""A backbone and a head as one model of an episode."""

from typing import Optional

import torch
from torch import Tensor, nn

from l2l_niw.errors import ArgumentError, ModelError
from l2l_niw.heads.base import Head
from l2l_niw.heads.predictions import Prediction
from l2l_niw.models.normalisation import uses_batch_statistics


class EpisodicModel(nn.Module):
    """
    **Description**

    `model(support_x, support_y, query_x)` is the head's prediction for the query, a distribution with
    `nll(query_y)`; `model(support_x, support_y)` is the support's own likelihood. Leading dimensions
    of the labels are episodes, which share the weights and nothing else.

    Support and query go through the backbone apart, as in MAML: a BatchNorm in training mode takes
    the statistics of either by itself, episode by episode.

    **Arguments**

    * **backbone** (Module) - From inputs (n, ...) to features (n, ...), which are flattened.
    * **head** (Head) - From `l2l_niw.heads`.

    **Example**

    ~~~python
    head = NearestCentroid('cosine', scale=10.0, learn_scale=True)
    model = EpisodicModel(l2l.vision.models.CNN4Backbone(hidden_size=32), head)
    niw = NIW(model, lr=0.01)
    learner = niw.clone()
    for step in range(5):
        learner.adapt(learner(x, y).nll(y))
    learner(x, y, x_query, y_query).loss(y_query).backward()
    probabilities = learner.posterior().predict(x, y, x_query, samples=10).probs
    ~~~
    """

    def __init__(self, backbone: nn.Module, head: Head):
        super().__init__()
        if not isinstance(head, Head):
            raise ModelError(f"head must be one of l2l_niw.heads, got {type(head).__name__}.")
        if not isinstance(backbone, nn.Module):
            raise ModelError(f"backbone must be a torch.nn.Module, got {type(backbone).__name__}.")
        self.backbone, self.head = backbone, head

    def forward(
        self,
        support_x: Tensor,
        support_y: Tensor,
        query_x: Optional[Tensor] = None,
        query_y: Optional[Tensor] = None,
        ways: Optional[int] = None,
    ) -> Prediction:
        """
        **Arguments**

        * **support_x** (Tensor) - (..., n, *input).
        * **support_y** (Tensor) - Integer labels, (..., n), or targets, (..., n, targets).
        * **query_x** (Tensor, *optional*, default=None) - (..., m, *input).
        * **query_y** (Tensor, *optional*, default=None) - In training: for the head's penalty, if it has one.
        * **ways** (int, *optional*, default=None) - Given under `torch.func.vmap` over episodes.

        **Returns** the head's `Prediction` for the query or, without one, for the support.
        """
        lead = self.head.lead(support_y)
        check_inputs(support_x, support_y, query_x, lead)
        support = self.features(support_x, lead) if self.head.needs_support or query_x is None else None
        query = support if query_x is support_x else None
        if query is None and query_x is not None:
            query = self.features(query_x, lead)
        return self.head(support, support_y, query, query_y, ways)

    def features(self, x: Tensor, lead: int = 0) -> Tensor:
        """The backbone's features, flat, (..., n, d), of inputs with `lead` dimensions of episodes."""
        if lead and uses_batch_statistics(self.backbone):
            return torch.stack([self.features(episode, lead - 1) for episode in x])
        features = self.backbone(x.flatten(0, lead))
        count = x.shape[: lead + 1].numel()
        if not isinstance(features, Tensor) or features.dim() < 2 or features.shape[0] != count:
            given = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ModelError(f"backbone must take {count} inputs to a tensor of shape ({count}, ...), not {given}.")
        return features.flatten(1).unflatten(0, x.shape[: lead + 1])


def check_inputs(support_x: Tensor, support_y: Tensor, query_x: Optional[Tensor], lead: int) -> None:
    """Raises an `ArgumentError` unless inputs and labels are tensors whose shapes agree."""
    shape = support_y.shape[: lead + 1]
    for name, x in (("support_x", support_x), ("query_x", query_x)):
        if not isinstance(x, Tensor) and not (x is None and name == "query_x"):
            raise ArgumentError(f"{name} must be a tensor, got {type(x).__name__}; use torch.as_tensor.")
    if support_x.shape[: lead + 1] != shape:
        raise ArgumentError(
            f"support_x has shape {tuple(support_x.shape)}, but support_y {tuple(support_y.shape)}: they must agree in "
            f"the first {lead + 1} dimensions, {lead} of episodes and one of data."
        )
    if query_x is None:
        return
    if query_x.shape[:lead] != shape[:lead] or query_x.shape[lead + 1 :] != support_x.shape[lead + 1 :]:
        raise ArgumentError(
            f"query_x has shape {tuple(query_x.shape)}, but support_x {tuple(support_x.shape)}: they may differ in the "
            f"number of data only, dimension {lead}."
        )
    if query_x.shape[lead] == 0:
        raise ArgumentError("query_x is empty; leave it out for the support's own likelihood.")
