"""The nearest-centroid classifier of Prototypical Networks."""

from typing import Optional

from torch import Tensor
from torch.nn import functional as F

from l2l_niw.heads.base import Head, Positive, check_choice
from l2l_niw.heads.labels import Labels
from l2l_niw.heads.predictions import Classes

DISTANCES = ("euclidean", "cosine")


def centroids(features: Tensor, members: Tensor) -> Tensor:
    """The mean feature of each class, (..., ways, d), from booleans (..., n, ways); 0 where it has no member."""
    shares = members / members.sum(-2, keepdim=True).clamp(min=1)
    return shares.to(features.dtype).mT @ features


def squared_distances(query: Tensor, centers: Tensor) -> Tensor:
    """|q - c|^2, (..., m, ways)."""
    return (query.unsqueeze(-2) - centers.unsqueeze(-3)).square().sum(-1)


class NearestCentroid(Head):
    """
    **Description**

    Logits are -scale |q - c|^2, or scale cos(q, c), from a query's feature q to the mean feature c of
    each class of the support: those of `learn2learn.nn.PrototypicalClassifier` at scale 1.

    **Arguments**

    * **distance** (str, *optional*, default='euclidean') - Squared 'euclidean', or 'cosine'.
    * **scale** (float, *optional*, default=1.0) - What logits are multiplied by. Cosines lie within
        [-1, 1] and want about 10.
    * **learn_scale** (bool, *optional*, default=False) - Whether it is learned, in log.

    **References**

    1. Snell et al. 2017. "Prototypical Networks for Few-shot Learning."

    **Example**

    ~~~python
    model = EpisodicModel(backbone, NearestCentroid('cosine', scale=10.0, learn_scale=True))
    ~~~
    """

    def __init__(self, distance: str = "euclidean", scale: float = 1.0, learn_scale: bool = False):
        super().__init__()
        check_choice("distance", distance, DISTANCES)
        self.distance = distance
        self.scale = Positive("scale", scale, learn_scale)

    def predict(self, support: Tensor, y: Labels, query: Tensor, query_y: Optional[Tensor]) -> Classes:
        """Logits from squared distances to the class means, or from cosines, (..., m, ways)."""
        centers = centroids(support, y.onehot)
        if self.distance == "euclidean":
            similarity = -squared_distances(query, centers)
        else:
            similarity = unit(query) @ unit(centers).mT
        return Classes(self.scale() * similarity, y)


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 in the direction of those in x, of the same shape."""
    return F.normalize(x, dim=-1, eps=1e-8)
