"""The trainable linear layer of MAML."""

from typing import Optional

from torch import Tensor, nn

from l2l_niw.errors import ArgumentError
from l2l_niw.heads.base import TASKS, Head, Positive, Targets, check_choice
from l2l_niw.heads.predictions import Classes, Gaussian, Prediction
from l2l_niw.utils._checks import check_number


class Linear(Head):
    """
    **Description**

    A linear layer, which knows of a task only what its weights have been adapted to; the support's
    features have no part. Its columns are the support's labels in sorted order.

    **Arguments**

    * **features** (int) - Dimensions of a feature.
    * **outputs** (int) - Ways, or dimensions of a target. Episodes of fewer ways use the first columns.
    * **task** (str, *optional*, default='classification') - Or 'regression'.
    * **noise** (float, *optional*, default=1.0) - A regression's standard deviation.
    * **learn_noise** (bool, *optional*, default=False) - Whether it is learned, in log.

    **Example**

    ~~~python
    model = EpisodicModel(backbone, Linear(64, 5))
    ~~~
    """

    needs_support = False

    def __init__(
        self,
        features: int,
        outputs: int,
        task: str = "classification",
        noise: float = 1.0,
        learn_noise: bool = False,
    ):
        super().__init__()
        check_choice("task", task, TASKS)
        check_number("features", features, 1, whole=True)
        check_number("outputs", outputs, 1, whole=True)
        self.task, self.features = task, features
        self.linear = nn.Linear(features, outputs)
        if task == "regression":
            self.noise = Positive("noise", noise, learn_noise)

    def targets(self, support_y: Tensor, ways: Optional[int]) -> Targets:
        """What `predict` takes as `y`; an `ArgumentError` where the linear layer's outputs do not fit it."""
        y, outputs = super().targets(support_y, ways), self.linear.out_features
        given = y.ways if self.task == "classification" else y.shape[-1]
        if given > outputs or (given < outputs and self.task == "regression"):
            what = "classes" if self.task == "classification" else "targets"
            raise ArgumentError(f"support_y has {given} {what}, but the linear head has {outputs} outputs.")
        return y

    def predict(self, support: Optional[Tensor], y: Targets, query: Tensor, query_y: Optional[Tensor]) -> Prediction:
        """The linear layer's outputs: logits, (..., m, ways), or a Gaussian's means, (..., m, targets)."""
        outputs = self.linear(query)
        if self.task == "regression":
            return Gaussian(outputs, self.noise())
        return Classes(outputs[..., : y.ways], y)
