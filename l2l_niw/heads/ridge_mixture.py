"""Bayesian ridge regression under several priors at once, weighed by what the support says of each."""

import math
from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from l2l_niw.heads.base import Head, Positive, check_width
from l2l_niw.heads.predictions import Evidence, EvidenceMixture, GaussianMixture
from l2l_niw.heads.ridge import with_constant
from l2l_niw.utils._checks import check_number
from l2l_niw.utils._linear_algebra import cholesky, log_determinant


class RidgeMixture(Head):
    """
    **Description**

    Bayesian linear regression on the features with a learned mixture as the weights' prior, for families of tasks of
    several kinds:

    $$w \\sim \\sum_k \\pi_k N(\\mu_k, diag(s_k^2)), \\qquad y = \\phi w + noise.$$

    Every component has its exact posterior, and the support's evidence says which of them the task is of: the
    prediction is a mixture of their predictives, with weights \\(\\pi_k\\,p(S|k)\\). Without a query it is the
    support's evidence under the mixture. With one component, \\(\\mu = 0\\) and equal scales it is `BayesianRidge`.

    **Arguments**

    * **features** (int) - Dimensions of a feature.
    * **components** (int, *optional*, default=4) - Of the prior.
    * **targets** (int, *optional*, default=1) - Dimensions of a target.
    * **noise** (float, *optional*, default=0.3) - Standard deviation of the noise at first; it is learned.
    * **prior_scale** (float, *optional*, default=1.0) - Of the linear layer's weights at first, times a random factor
        for each, by which the components differ.

    **References**

    1. Bishop. 2006. "Pattern Recognition and Machine Learning", Sec. 3.3, 3.5 and 14.5.

    **Example**

    ~~~python
    model = EpisodicModel(MLP(1, (40, 40), activate_last=True), RidgeMixture(40))
    learner = NIW(model, lr=0.01).clone()
    learner.adapt(learner(x, y).nll(y))           # the evidence
    prediction = learner(x, y, x_query)           # a mixture: mean, stddev, cdf
    ~~~
    """

    task = "regression"

    def __init__(
        self, features: int, components: int = 4, targets: int = 1, noise: float = 0.3, prior_scale: float = 1.0
    ):
        super().__init__()
        for name, value in (("features", features), ("components", components), ("targets", targets)):
            check_number(name, value, 1, whole=True)
        check_number("prior_scale", prior_scale, 0, strict=True)
        self.features = features
        self.noise = Positive("noise", noise, True)
        self.log_scale = nn.Parameter(math.log(prior_scale) + 0.5 * torch.randn(components, features + 1))
        self.mean = nn.Parameter(torch.zeros(components, features + 1, targets))
        self.logits = nn.Parameter(torch.zeros(components))

    def _prior(self, features: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """
        Features with a constant, (..., n, d), each component's mean at them, (..., components, n, targets), and its
        scales, (components, d). In double precision: nothing holds a component back that no task is of, and its
        scales may outgrow float32.
        """
        phi, mean = with_constant(features).double(), self.mean.double()
        means = (phi @ mean.transpose(0, 1).flatten(1)).unflatten(-1, mean.shape[::2]).transpose(-3, -2)
        return phi, means, self.log_scale.double().exp()

    def explain(self, support: Tensor, y: Tensor) -> EvidenceMixture:
        """The support's marginal likelihood under the mixture prior."""
        phi, means, scale = self._prior(support)
        evidence = Evidence(phi.unsqueeze(-3) * scale.unsqueeze(-2), self.noise().double(), y.shape[-1])
        return EvidenceMixture(evidence, means, self.logits.log_softmax(-1))

    def predict(self, support: Tensor, y: Tensor, query: Tensor, query_y: Optional[Tensor]) -> GaussianMixture:
        """
        As of Gaussian processes whose kernels differ in the scales: one factor of the support's covariance is all a
        component needs, and the queries' features, of which there are many, are not scaled for each.
        """
        phi, means, scale = self._prior(support)
        phi_query, means_query, _ = self._prior(query)
        variance, n = self.noise().double().square(), phi.shape[-2]
        scaled = (phi.unsqueeze(-3) * scale.square().unsqueeze(-2)).flatten(-3, -2)  # (..., components * n, d)
        kernel = (scaled @ torch.cat([phi, phi_query], -2).mT).unflatten(-2, (-1, n))
        lower = cholesky(kernel[..., :n] + variance * torch.eye(n).to(kernel))
        white = torch.linalg.solve_triangular(
            lower, torch.cat([kernel[..., n:], y.unsqueeze(-3) - means], -1), upper=False
        )
        cross, residual = white.tensor_split([phi_query.shape[-2]], -1)
        prior = (phi_query.square() @ scale.square().mT).mT
        spread = (prior - cross.square().sum(-2)).clamp_min(0.0)  # below 0 by rounding only
        evidence = -0.5 * (residual.square().sum((-2, -1)) + y.shape[-1] * log_determinant(lower))
        log_weights = (self.logits + evidence).log_softmax(-1).unsqueeze(-2)
        means, scales = means_query + cross.mT @ residual, (variance + spread).sqrt().unsqueeze(-1)
        parts = [part.transpose(-3, -2) for part in (means, scales.expand_as(means))]
        parts.append(log_weights.expand(*parts[0].shape[:-1]))
        return GaussianMixture(*(part.to(support.dtype) for part in parts))

    def targets(self, support_y: Tensor, ways: Optional[int]) -> Tensor:
        """The targets, (..., n, targets); an `ArgumentError` if they have another width than the head was built for."""
        y = super().targets(support_y, ways)
        check_width(y, self.mean.shape[-1])
        return y
