"""A support whose data are predicted from each other: something to learn for inner steps."""

from typing import Optional

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError, ModelError
from l2l_niw.heads.base import Head
from l2l_niw.heads.predictions import LeftOut, Prediction


def others(n: int, device: Optional[torch.device] = None) -> Tensor:
    """For each of n data the places of all others, (n, n - 1)."""
    rest = torch.arange(n - 1, device=device)
    return rest + (rest >= torch.arange(n, device=device).unsqueeze(-1))


class LeaveOneOut(Head):
    """
    **Description**

    A head that predicts a query as it did, and without one predicts each example of the support from all the others.
    A closed form such as ridge regression fits its own support whatever the features, so that a support which
    predicts itself says little of theta; what is left out says how well these features predict. As a classifier
    it needs two shots of every class.

    **Arguments**

    * **head** (Head) - Any other.

    **Example**

    ~~~python
    model = EpisodicModel(MLP(1, (40, 40), activate_last=True), LeaveOneOut(Ridge('regression')))
    learner = NIW(model, lr=0.01).clone()
    learner.adapt(learner(x, y).nll(y))           # each from the others
    prediction = learner(x, y, x_query)           # the query, from all of them
    ~~~
    """

    def __init__(self, head: Head):
        super().__init__()
        if not isinstance(head, Head):
            raise ModelError(f"head must be one of l2l_niw.heads, got {type(head).__name__}.")
        self.head = head
        self.task, self.needs_support, self.features = head.task, head.needs_support, head.features

    def forward(
        self,
        support: Tensor,
        support_y: Tensor,
        query: Optional[Tensor] = None,
        query_y: Optional[Tensor] = None,
        ways: Optional[int] = None,
    ) -> Prediction:
        """The head's prediction for the query or, without one, a `LeftOut`: each example's from the n - 1 others."""
        if query is not None or query_y is not None:
            return self.head(support, support_y, query, query_y, ways)
        lead = self.lead(support_y)
        self._check_features("support", support, support_y, lead)
        n = support_y.shape[lead]
        if n < 2:
            raise ArgumentError("support_y holds one example, which leaves none to predict it from; give two at least.")
        rows = (slice(None),) * lead + (others(n, support.device),)
        return LeftOut(self.head(support[rows], support_y[rows], support.unsqueeze(-2), None, ways))
