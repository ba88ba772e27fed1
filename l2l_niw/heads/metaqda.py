"""MetaQDA: one Gaussian per class, with a learned Normal-Inverse-Wishart prior over features."""

import math
from typing import Optional

import torch
from torch import Tensor, nn

from l2l_niw.heads.base import Head, check_choice
from l2l_niw.heads.labels import Labels
from l2l_niw.heads.nearest_centroid import centroids
from l2l_niw.heads.predictions import Classes
from l2l_niw.utils._checks import check_number
from l2l_niw.utils._linear_algebra import log_determinant, ridge_factor, ridge_spread

INFERENCES = ("map", "bayesian")


class MetaQDA(Head):
    """
    **Description**

    Features of a class are N(mu, Sigma), with mu | Sigma ~ N(m, Sigma / kappa) and Sigma ~ IW(S, nu), which all
    classes share and meta-training learns. With the n features of a class in the support,

        kappa_n = kappa + n,  nu_n = nu + n,  m_n = (kappa m + n xbar) / kappa_n,
        S_n = S + sum (x - xbar)(x - xbar)^T + kappa n / kappa_n (xbar - m)(xbar - m)^T,

    and logits are the class's log density at the query: N(m_n, S_n / (nu_n + d + 2)) for 'map', the
    predictive Student-t of nu_n - d + 1 degrees of freedom for 'bayesian'. Everything is done in
    coordinates where S = I, in which S_n is I plus a matrix of rank n + 1.

    **Arguments**

    * **features** (int) - d, dimensions of a feature. S has d (d + 1) / 2 parameters.
    * **inference** (str, *optional*, default='bayesian') - Or 'map'.
    * **kappa** (float, *optional*, default=1.0) - At the start: the prior mean counts as so many data.
    * **nu** (float, *optional*, default=None) - At the start; above d - 1. Defaults to d + 2.
    * **spread** (float, *optional*, default=None) - S = spread I at the start. Defaults to what makes a class's
        covariance about I: 1 for 'bayesian', nu + d + 2 for 'map'.

    **References**

    1. Zhang et al. 2021. "Shallow Bayesian Meta Learning for Real-World Few-Shot Recognition."

    **Example**

    ~~~python
    model = EpisodicModel(backbone.requires_grad_(False), MetaQDA(64))   # the baseline: a fixed backbone
    ~~~
    """

    features: int

    def __init__(
        self,
        features: int,
        inference: str = "bayesian",
        kappa: float = 1.0,
        nu: Optional[float] = None,
        spread: Optional[float] = None,
    ):
        super().__init__()
        check_number("features", features, 1, whole=True)
        check_choice("inference", inference, INFERENCES)
        nu = features + 2.0 if nu is None else nu
        if spread is None:
            spread = nu + features + 2 if inference == "map" else 1.0
        check_number("kappa", kappa, 0, strict=True)
        check_number("nu", nu, features - 1, strict=True)
        check_number("spread", spread, 0, strict=True)
        self.features, self.inference = features, inference
        self.mean = nn.Parameter(torch.zeros(features))
        self.log_kappa = nn.Parameter(torch.tensor(math.log(kappa)))
        self.log_freedom = nn.Parameter(torch.tensor(math.log(nu - features + 1)))
        self.log_diagonal = nn.Parameter(torch.full((features,), 0.5 * math.log(spread)))
        self.below = nn.Parameter(torch.zeros(features * (features - 1) // 2))

    def lower(self) -> Tensor:
        """The Cholesky factor of S."""
        d = self.features
        row, column = torch.tril_indices(d, d, -1, device=self.below.device)
        below = torch.zeros(d * d, dtype=self.below.dtype, device=self.below.device)
        below = below.scatter(0, row * d + column, self.below).view(d, d)
        return below + torch.diag_embed(self.log_diagonal.exp())

    def predict(self, support: Tensor, y: Labels, query: Tensor, query_y: Optional[Tensor]) -> Classes:
        """Logits: each class's log density at the query's features, (..., m, ways)."""
        lower, kappa = self.lower(), self.log_kappa.exp()
        a, b = (torch.linalg.solve_triangular(lower, (x - self.mean).mT, upper=False).mT for x in (support, query))
        n = y.onehot.sum(-2).to(a.dtype)
        center = centroids(a, y.onehot)
        within = y.onehot.mT.unsqueeze(-1) * (a.unsqueeze(-3) - center.unsqueeze(-2))
        some = n.clamp(min=1)  # a column without data has its centre at 0, and must not divide by it
        between = (kappa * some / (kappa + some)).sqrt().unsqueeze(-1) * center
        update = torch.cat([within, between.unsqueeze(-2)], -2)  # S_n = I + update^T update, a class
        delta = b.unsqueeze(-3) - (n / (kappa + n))[..., None, None] * center.unsqueeze(-2)
        one = torch.ones((), dtype=a.dtype, device=a.device)
        factor = ridge_factor(update, one)
        distance = ridge_spread(update, factor, delta, one)
        log_det = 2 * self.log_diagonal.sum() + log_determinant(factor)
        return Classes(self.log_density(distance, log_det, n, kappa).mT, y)

    def log_density(self, distance: Tensor, log_det: Tensor, n: Tensor, kappa: Tensor) -> Tensor:
        """(..., ways, m), from S_n's log determinant and the distances in it from a query to m_n."""
        d, freedom = self.features, self.log_freedom.exp() + n  # nu_n - d + 1
        if self.inference == "map":
            scale = (freedom + 2 * d + 1).unsqueeze(-1)
            return -0.5 * (log_det.unsqueeze(-1) - d * scale.log() + scale * distance + d * math.log(2 * math.pi))
        scale = (kappa + n) / (kappa + n + 1)  # times nu_n - d + 1: the inverse of the t's scale, in units of S_n
        normaliser = torch.lgamma(0.5 * (freedom + d)) - torch.lgamma(0.5 * freedom) - 0.5 * d * math.log(math.pi)
        normaliser = normaliser - 0.5 * (log_det - d * scale.log())
        tail = torch.log1p(scale.unsqueeze(-1) * distance)
        return normaliser.unsqueeze(-1) - 0.5 * (freedom + d).unsqueeze(-1) * tail
