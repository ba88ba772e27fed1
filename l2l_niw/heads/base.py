"""The one interface of all heads: p(y | x, S, theta)."""

import math
from typing import Any, Optional

import torch
from torch import Tensor, nn

from l2l_niw.errors import ArgumentError
from l2l_niw.heads.labels import encode
from l2l_niw.heads.predictions import Prediction, check_targets
from l2l_niw.utils._checks import check_number

TASKS = ("classification", "regression")
Targets = Any  # `Labels` of a classification, a tensor of a regression: a head's task says which


class Positive(nn.Module):
    """A positive number, fixed or learned in log."""

    def __init__(self, name: str, value: float, learned: bool):
        super().__init__()
        check_number(name, value, 0, strict=True)
        log = torch.tensor(math.log(value), dtype=torch.get_default_dtype())
        if learned:
            self.log = nn.Parameter(log)
        else:
            self.register_buffer("log", log)

    def forward(self) -> Tensor:
        """The number, as a scalar tensor."""
        return self.log.exp()


class Head(nn.Module):
    """
    **Description**

    Predicts a query from its features and a labelled support set: `head(support, support_y, query)` is a
    `Prediction`, a `torch.distributions.Distribution` with `nll(query_y)`. Labels are any integers,
    (..., n); targets of a regression are (..., n, targets); leading dimensions are episodes.

    Without a query it is what the support says of theta, p(S | theta): the likelihood of inner steps
    and of test-time inference. Most heads predict the support from itself.

    A head implements `predict`, on tensors only: no in-place writes and no look at values, so that
    `torch.func.vmap` over weights works.

    **Arguments**

    * **support** (Tensor) - Features of the support, (..., n, d).
    * **support_y** (Tensor) - Its labels or targets.
    * **query** (Tensor, *optional*, default=None) - Features of the query, (..., m, d).
    * **query_y** (Tensor, *optional*, default=None) - In training, for heads whose loss has a penalty
        (FEAT's contrastive term, a latent's KL), which `Prediction.loss` adds. Not given at test.
    * **ways** (int, *optional*, default=None) - The number of classes. Counted if not given; give it
        under `torch.func.vmap` over episodes, where labels cannot be looked at.
    """

    task = "classification"
    needs_support = True  # whether predictions need the support's features
    features: Optional[int] = None  # the width that the head was built for, if it has one

    def forward(
        self,
        support: Tensor,
        support_y: Tensor,
        query: Optional[Tensor] = None,
        query_y: Optional[Tensor] = None,
        ways: Optional[int] = None,
    ) -> Prediction:
        """Checks the inputs; returns the prediction for the query or, without one, the support's own likelihood."""
        lead = self.lead(support_y)
        for name, features in (("support", support), ("query", query)):
            self._check_features(name, features, support_y, lead)
        if query_y is not None:
            if query is None:
                raise ArgumentError("query_y was given without a query.")
            check_targets(query_y, query.shape[:-1] + support_y.shape[lead + 1 :])
        y = self.targets(support_y, ways)
        return self.explain(support, y) if query is None else self.predict(support, y, query, query_y)

    def _check_features(self, name: str, features: Optional[Tensor], y: Tensor, lead: int) -> None:
        if features is None:
            return
        if self.features not in (None, features.shape[-1]):
            width = features.shape[-1]
            raise ArgumentError(f"{name} has features of width {width}, but the head was built for {self.features}.")
        agree = lead + 1 if name == "support" else lead
        if features.dim() != lead + 2 or features.shape[:agree] != y.shape[:agree]:
            raise ArgumentError(
                f"{name} has features of shape {tuple(features.shape)}, which do not go with support_y of shape "
                f"{tuple(y.shape)}."
            )
        if torch.float64 in (y.dtype, features.dtype) and y.is_floating_point() and y.dtype != features.dtype:
            raise ArgumentError(f"support_y is {y.dtype}, features are {features.dtype}: use .to({features.dtype}).")

    def predict(self, support: Tensor, y: Targets, query: Tensor, query_y: Optional[Tensor]) -> Prediction:
        """The prediction for a query's features, (..., m, d), from the support and what `targets` returned for it."""
        raise NotImplementedError

    def explain(self, support: Tensor, y: Targets) -> Prediction:
        """The support's own likelihood, p(S | theta): by default, the prediction for the support from itself."""
        return self.predict(support, y, support, None)

    def lead(self, support_y: Tensor) -> int:
        """The number of leading dimensions that are episodes; raises where targets are not of the head's kind."""
        classification = self.task == "classification"
        if not isinstance(support_y, Tensor) or support_y.is_floating_point() == classification:
            kind = "integer labels; use .long()" if classification else "real targets; use .float()"
            given = support_y.dtype if isinstance(support_y, Tensor) else type(support_y).__name__
            raise ArgumentError(f"support_y is {given}, but a head for {self.task} needs a tensor of {kind}.")
        lead = support_y.dim() - (1 if classification else 2)
        if lead < 0:
            shape = "(n,)" if classification else "(n, targets); use support_y.unsqueeze(-1) for one target"
            raise ArgumentError(f"support_y has shape {tuple(support_y.shape)}, but a {self.task} needs {shape}.")
        if support_y.numel() == 0:
            raise ArgumentError("support_y is empty: an episode needs at least one support example.")
        return lead

    def targets(self, support_y: Tensor, ways: Optional[int]) -> Targets:
        """What `predict` takes as `y`: `Labels` for a classification, the targets themselves for a regression."""
        return encode(support_y, ways) if self.task == "classification" else support_y


def check_choice(name: str, value: str, choices: tuple) -> None:
    """Raises an `ArgumentError` unless the value is one of the choices."""
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {choices}, got {value!r}.")


def check_width(y: Tensor, targets: int) -> None:
    """Raises an `ArgumentError` unless targets, (..., n, targets), have the width that the head was built for."""
    if y.shape[-1] != targets:
        raise ArgumentError(f"support_y has {y.shape[-1]} targets, but the head was built for {targets}.")
