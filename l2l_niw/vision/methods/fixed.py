"""Nothing but the pretrained backbone: nearest centroids, and a linear classifier fitted to every support."""

import math
from typing import Dict, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from l2l_niw.data import Tasks
from l2l_niw.vision.backbone import Backbone, make_backbone
from l2l_niw.vision.loops import Method
from l2l_niw.vision.methods.spec import Spec

START = 10.0  # of a learned scale of logits


class FixedBackbone(Method):
    """
    **Description**

    A classifier on the features of a fixed backbone. What meta-training learns is the scale of its logits, and
    `center`, the mean feature of its tasks.

    **Arguments**

    * **body** (Backbone) - As it was pretrained.
    """

    def __init__(self, body: Backbone):
        center = nn.Parameter(torch.zeros(body.features))
        scale = nn.Parameter(torch.tensor(math.log(START)))
        self.module = nn.ModuleDict({"body": body.requires_grad_(False)})
        self.module.register_parameter("center", center)
        self.module.register_parameter("log_scale", scale)

    def features(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        """Centred features of length 1, of support and query."""
        with torch.no_grad():
            found = [self.module["body"](images) for images in (task.x, task.x_query)]
        support, query = (F.normalize(own - self.module.center, dim=-1) for own in found)
        return support, query

    def logits(self, support: Tensor, y: Tensor, query: Tensor) -> Tensor:
        """Of the query, (m, ways)."""
        raise NotImplementedError

    def loss(self, task: Tasks) -> Tuple[Tensor, Tensor]:
        """The query's cross-entropy, and its logits."""
        support, query = self.features(task)
        logits = self.logits(support, task.y, query)
        return F.cross_entropy(logits, task.y_query), logits

    def log_probabilities(self, task: Tasks) -> Tensor:
        """Log-probabilities of the query, (m, ways)."""
        with torch.no_grad():
            support, query = self.features(task)
        return self.logits(support, task.y, query).detach().log_softmax(-1)


class SimpleShot(FixedBackbone):
    """
    **Description**

    Nearest centroids on centred features of length 1.

    **References**

    1. Wang et al. 2019. "SimpleShot: Revisiting Nearest-Neighbor Classification for Few-Shot Learning."
    """

    def logits(self, support: Tensor, y: Tensor, query: Tensor) -> Tensor:
        """Negative squared distances to the class means, scaled."""
        centers = torch.stack([support[y == c].mean(0) for c in range(int(y.max()) + 1)])
        return -self.module.log_scale.exp() * torch.cdist(query, centers).square()


class LinearClassifier(FixedBackbone):
    """
    **Description**

    A linear classifier that is fitted to every support by gradient descent on its cross-entropy, from 0.

    **Arguments**

    * **steps** (int) - Of gradient descent.
    * **lr** (float) - Their size.

    **References**

    1. Chen et al. 2019. "A Closer Look at Few-shot Classification." ICLR. Its "Baseline".
    """

    def __init__(self, body: Backbone, steps: int, lr: float):
        super().__init__(body)
        self.steps, self.lr = steps, lr

    def logits(self, support: Tensor, y: Tensor, query: Tensor) -> Tensor:
        """The classifier's, after its steps."""
        ways, onehot = int(y.max()) + 1, F.one_hot(y).to(support)
        scale = self.module.log_scale.exp()
        weight, bias = support.new_zeros(ways, support.shape[1]), support.new_zeros(ways)
        for _ in range(self.steps):  # the gradient of the mean cross-entropy, written out
            error = ((scale * support @ weight.T + bias).softmax(-1) - onehot) / len(y)
            weight, bias = weight - self.lr * scale * error.T @ support, bias - self.lr * error.sum(0)
        return scale * query @ weight.T + bias


FIXED: Dict[str, Spec] = {
    "simpleshot": Spec("SimpleShot", lambda c: SimpleShot(make_backbone(c)), lr=0.01, fixed=True),
    "linear": Spec(
        "linear classifier, fixed backbone",
        lambda c: LinearClassifier(make_backbone(c), c.steps, c.inner_lr),  # type: ignore[arg-type]
        lr=0.01,
        inner_lr=0.1,
        steps=50,
        fixed=True,
    ),
}
