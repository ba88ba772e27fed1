"""FEAT: prototypes that see each other through a transformer."""

from typing import Optional

import torch
from torch import Tensor, nn

from l2l_niw.heads._attention import MultiHeadAttention
from l2l_niw.heads.base import Head, Positive
from l2l_niw.heads.labels import Labels
from l2l_niw.heads.nearest_centroid import centroids, squared_distances
from l2l_niw.heads.predictions import Classes
from l2l_niw.utils._checks import check_number


class FEAT(Head):
    """
    **Description**

    A set-to-set function adapts the prototypes to each other, c' = LayerNorm(c + attention(c, c, c)), and
    logits are -scale |q - c'|^2. In training, where `query_y` is given, `Prediction.loss` adds the
    contrastive term: the same function adapts the data of each class among themselves, and every
    example should be nearest to the mean of its own class.

    **Arguments**

    * **features** (int) - Dimensions of a feature.
    * **heads** (int, *optional*, default=1) - Attention heads; the paper's is one.
    * **scale** (float, *optional*, default=None) - What squared distances are multiplied by. Defaults to
        1 / features, for LayerNorm's prototypes have a squared length of about `features`.
    * **learn_scale** (bool, *optional*, default=True) - Whether it is learned, in log.
    * **contrast** (float, *optional*, default=0.1) - Weight of the contrastive term.
    * **dropout** (float, *optional*, default=0.0) - On what the attention adds; the paper's code has 0.5.

    **References**

    1. Ye et al. 2020. "Few-Shot Learning via Embedding Adaptation with Set-to-Set Functions."

    **Example**

    ~~~python
    model = EpisodicModel(backbone, FEAT(64))
    model(x, y, x_query, y_query).loss(y_query).backward()
    ~~~
    """

    def __init__(
        self,
        features: int,
        heads: int = 1,
        scale: Optional[float] = None,
        learn_scale: bool = True,
        contrast: float = 0.1,
        dropout: float = 0.0,
    ):
        super().__init__()
        check_number("features", features, 1, whole=True)
        check_number("contrast", contrast, 0)
        self.features, self.contrast = features, contrast
        self.scale = Positive("scale", 1.0 / features if scale is None else scale, learn_scale)
        self.attention = MultiHeadAttention(features, heads)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(features)

    def adapt(self, x: Tensor, mask: Tensor) -> Tensor:
        """The set-to-set function; `mask` says who sees whom."""
        return self.norm(x + self.dropout(self.attention(x, x, x, mask)))

    def predict(self, support: Tensor, y: Labels, query: Tensor, query_y: Optional[Tensor]) -> Classes:
        """Logits from distances to the adapted prototypes, (..., m, ways); `query_y` adds the contrastive penalty."""
        centers = self.adapt(centroids(support, y.onehot), y.present.unsqueeze(-2))
        prediction = Classes(-self.scale() * squared_distances(query, centers), y)
        if query_y is not None and self.contrast > 0:
            members = torch.cat([y.onehot, y.match(query_y)], -2)
            prediction.penalty = self.contrast * self.contrastive(torch.cat([support, query], -2), y, members)
        return prediction

    def contrastive(self, x: Tensor, y: Labels, members: Tensor) -> Tensor:
        """Mean -log p(own class | x) by distance to the means of the classes, each adapted within itself."""
        same = (members.unsqueeze(-2) & members.unsqueeze(-3)).any(-1)
        centers = centroids(self.adapt(x, same), members)
        log_p = Classes(-self.scale() * squared_distances(x, centers), y).logits
        return -torch.where(members, log_p, 0.0).sum(-1).mean()
