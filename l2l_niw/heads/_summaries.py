"""What a query is told of the support by a neural process's deterministic path."""

from typing import Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from l2l_niw.heads._attention import Block, MultiHeadAttention
from l2l_niw.models.mlp import MLP
from l2l_niw.utils._checks import check_number

AGGREGATIONS = ("mean", "max", "bayesian")


def bayesian_aggregation(observed: Tensor, raw: Tensor) -> Tuple[Tensor, Tensor]:
    """
    Mean and variance of a latent z ~ N(0, I) of which every example is an observation N(observed_i; z, variance_i),
    with variance_i = 1e-5 + softplus(raw_i): variance_z = 1 / (1 + sum 1 / variance_i) and
    mean_z = variance_z sum observed_i / variance_i.
    """
    precision = 1.0 / (1e-5 + F.softplus(raw))
    variance = 1.0 / (1.0 + precision.sum(-2))
    return variance * (precision * observed).sum(-2), variance


def pool(r: Tensor, aggregate: str) -> Tensor:
    return r.mean(-2) if aggregate == "mean" else r.amax(-2)


class Aggregate(nn.Module):
    """
    **Description**

    One summary for all queries: the mean or the maximum of the encoded pairs, or mean and variance by
    Bayesian aggregation.

    **Arguments**

    * **width** (int) - Width of an encoded pair.
    * **aggregate** (str) - One of 'mean', 'max', 'bayesian'.
    """

    def __init__(self, width: int, aggregate: str):
        super().__init__()
        self.aggregate, self.width = aggregate, 2 * width if aggregate == "bayesian" else width
        if aggregate == "bayesian":
            self.observe = nn.Linear(width, 2 * width)

    def forward(self, r: Tensor, support: Tensor, query: Tensor) -> Tensor:
        if self.aggregate == "bayesian":
            summary = torch.cat(bayesian_aggregation(*self.observe(r).chunk(2, -1)), -1)
        else:
            summary = pool(r, self.aggregate)
        return summary.unsqueeze(-2).expand(*query.shape[:-1], -1)


class CrossAttention(nn.Module):
    """
    **Description**

    A summary for each query, which attends to the support: keys and queries are embedded features,
    values the encoded pairs.

    **Arguments**

    * **features** (int) - Dimensions of a feature.
    * **width** (int) - Width of an encoded pair.
    * **heads** (int) - Attention heads.
    * **self_layers** (int) - Layers in which the pairs first attend to each other.
    * **cross_layers** (int) - Further layers in which the queries look at the pairs again.
    """

    def __init__(self, features: int, width: int, heads: int, self_layers: int, cross_layers: int):
        super().__init__()
        check_number("self_layers", self_layers, 0, whole=True)
        check_number("cross_layers", cross_layers, 0, whole=True)
        self.width = width
        self.embed = MLP(features, [width, width])
        self.among = nn.ModuleList(Block(width, heads) for _ in range(self_layers))
        self.attention = MultiHeadAttention(width, heads)
        self.across = nn.ModuleList(Block(width, heads) for _ in range(cross_layers))

    def forward(self, r: Tensor, support: Tensor, query: Tensor) -> Tensor:
        for layer in self.among:
            r = layer(r)
        told = self.attention(self.embed(query), self.embed(support), r)
        for layer in self.across:
            told = layer(told, r)
        return told
