"""Bayesian ridge regression under several priors at once, weighed by what the support says of each."""

import math
from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from l2l_niw.checks import check_number
from l2l_niw.heads.base import Head, Positive, check_width
from l2l_niw.heads.ridge import with_constant
from l2l_niw.linear_algebra import ridge_factor, ridge_spread, ridge_weights
from l2l_niw.predictions import Evidence, EvidenceMixture, GaussianMixture


class RidgeMixture(Head):
    """
    **Description**

    Bayesian linear regression on the features with a learned mixture as the readout's prior, for families of tasks of
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
    * **prior_scale** (float, *optional*, default=1.0) - Of the readout's weights at first, times a random factor
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

    def _by_component(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        """
        Features in units of each component's scales, (..., components, n, d), and its mean at them. In double
        precision: nothing holds a component back that no task is of, and its scales may outgrow float32.
        """
        phi = with_constant(features).double().unsqueeze(-3)
        return phi * self.log_scale.double().exp().unsqueeze(-2), phi @ self.mean.double()

    def explain(self, support: Tensor, y: Tensor) -> EvidenceMixture:
        phi, mean = self._by_component(support)
        return EvidenceMixture(Evidence(phi, self.noise().double(), y.shape[-1]), mean, self.logits.log_softmax(-1))

    def predict(self, support: Tensor, y: Tensor, query: Tensor, query_y: Optional[Tensor]) -> GaussianMixture:
        phi, mean = self._by_component(support)
        phi_query, mean_query = self._by_component(query)
        noise = self.noise().double()
        lower = ridge_factor(phi, noise.square())
        means = mean_query + phi_query @ ridge_weights(phi, lower, y.unsqueeze(-3) - mean)
        spread = ridge_spread(phi, lower, phi_query, noise.square())
        scales = (noise * (1.0 + spread).sqrt()).unsqueeze(-1).expand_as(means)
        log_weights = self.explain(support, y).joint(y).log_softmax(-1)
        log_weights = log_weights.unsqueeze(-2).expand(*means.shape[:-3], means.shape[-2], -1)
        parts = (means.transpose(-3, -2), scales.transpose(-3, -2), log_weights)
        return GaussianMixture(*(part.to(support.dtype) for part in parts))

    def targets(self, support_y: Tensor, ways: Optional[int]) -> Tensor:
        y = super().targets(support_y, ways)
        check_width(y, self.mean.shape[-1])
        return y
