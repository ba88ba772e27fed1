"""Heads that solve for a task's classes from its support: ProtoNet, ridge, MetaOptNet, FEAT and MetaQDA."""

from functools import partial
from typing import Any, Callable, Dict, Optional

import learn2learn as l2l
from torch import Tensor

from l2l_niw.errors import ArgumentError
from l2l_niw.heads import FEAT, Head, MetaQDA, NearestCentroid, Ridge
from l2l_niw.heads.base import Positive
from l2l_niw.heads.episodic import EpisodicModel
from l2l_niw.heads.predictions import Classes
from l2l_niw.vision.backbone import make_backbone
from l2l_niw.vision.config import Config
from l2l_niw.vision.loops import Episodic, Method
from l2l_niw.vision.methods.spec import Spec


def protonet(features: int) -> NearestCentroid:
    """ProtoNet's head: squared Euclidean distances to class means."""
    return NearestCentroid("euclidean", scale=5.0 / features, learn_scale=True)


def ridge(features: int) -> Ridge:
    """The regulariser starts at the size of a feature's squared norm: a small one would fit the support's noise."""
    return Ridge(lam=float(features), learn_lam=True, scale=10.0)


def qda(features: int, inference: str = "bayesian") -> MetaQDA:
    """MetaQDA's head, with initial covariances that are wide beside the features, so that logits start small."""
    spread = 10.0 * features if inference == "bayesian" else 30.0 * (2 * features + 4)
    return MetaQDA(features, inference, spread=spread)


def feat(features: int) -> FEAT:
    """FEAT's head."""
    return FEAT(features)


class SupportVectors(Head):
    """
    **Description**

    MetaOptNet's head: learn2learn's differentiable SVM, on features of length 1, with learned scale. One episode at
    a time.

    **References**

    1. Lee et al. 2019. "Meta-Learning with Differentiable Convex Optimization." CVPR.
    """

    def __init__(self, scale: float = 10.0):
        super().__init__()
        self.scale = Positive("scale", scale, learned=True)

    def predict(self, support: Tensor, y: Any, query: Tensor, query_y: Optional[Tensor]) -> Classes:
        """The SVM's scores of the query, (m, ways)."""
        if support.dim() != 2:
            raise ArgumentError("learn2learn's SVM takes one episode at a time: call it for each of them.")
        labels = y.onehot.int().argmax(-1)
        machine = l2l.nn.SVClassifier(support, labels, y.ways, normalize=True)
        return Classes(self.scale() * machine(query), y)


def metaoptnet(features: int) -> SupportVectors:
    """MetaOptNet's head."""
    return SupportVectors()


def head(make: Callable, fixed: bool = False) -> Callable[[Config], Method]:
    """A builder of a head without NIW, on a backbone that is trained with it or stays as it was pretrained."""

    def made(config: Config) -> Method:
        body = make_backbone(config).requires_grad_(not fixed)
        return Episodic(EpisodicModel(body, make(body.features)))

    return made


qda_map = partial(qda, inference="map")
HEADS: Dict[str, Spec] = {
    "protonet": Spec("ProtoNet", head(protonet)),
    "protonet-batch": Spec("ProtoNet, transductive", head(protonet), transductive=True, settings_of="protonet"),
    "ridge": Spec("ridge (R2D2)", head(ridge)),
    "metaoptnet": Spec("MetaOptNet", head(metaoptnet)),
    "feat": Spec("FEAT", head(feat)),
    "metaqda-map-fixed": Spec("MetaQDA, MAP, fixed backbone", head(qda_map, fixed=True), lr=0.003, fixed=True),
    "metaqda-fixed": Spec("MetaQDA, Bayesian, fixed backbone", head(qda, fixed=True), lr=0.003, fixed=True),
    "metaqda-map": Spec("MetaQDA, MAP", head(qda_map)),
    "metaqda": Spec("MetaQDA, Bayesian", head(qda)),
}
