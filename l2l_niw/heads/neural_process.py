"""Conditional and attentive neural processes: the support as a learned summary."""

from typing import Optional, Union

import torch
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn import functional as F

from l2l_niw.errors import ArgumentError
from l2l_niw.heads._summaries import AGGREGATIONS, Aggregate, CrossAttention, bayesian_aggregation, pool
from l2l_niw.heads.base import Head, check_choice, check_width
from l2l_niw.heads.predictions import Gaussian, Prediction
from l2l_niw.models.mlp import MLP
from l2l_niw.utils._checks import check_number


class NeuralProcess(Head):
    """
    **Description**

    What CNP and ANP share: an encoder of pairs (feature, target), a deterministic summary of them, a
    latent one, or both, and a decoder of a query's feature and summary to mean and standard deviation.

    **Arguments**

    * **summary** (Module) - Of the deterministic path, or None.
    * **others** - `CNP`'s.
    """

    task = "regression"

    def __init__(
        self,
        features: int,
        targets: int,
        summary: Union[Aggregate, CrossAttention, None],
        width: int,
        depth: int,
        aggregate: str,
        latent: bool,
        samples: int,
        floor: float,
    ):
        super().__init__()
        check_number("features", features, 1, whole=True)
        check_number("targets", targets, 1, whole=True)
        check_choice("aggregate", aggregate, AGGREGATIONS)
        check_number("depth", depth, 1, whole=True)
        check_number("samples", samples, 1, whole=True)
        check_number("floor", floor, 0, strict=True)
        if not latent and summary is None:
            raise ArgumentError("latent and deterministic are both False: the decoder would not see the support.")
        self.features, self.n_targets = features, targets
        self.aggregate, self.samples, self.floor = aggregate, samples, floor
        pair, told = features + targets, features + width * latent
        self.latent = MLP(pair, [width] * depth + [2 * width]) if latent else None
        self.summary = summary
        if summary is not None:
            self.encoder = MLP(pair, [width] * depth)
            told += summary.width
        self.decoder = MLP(told, [width] * depth + [2 * targets])

    def targets(self, support_y: Tensor, ways: Optional[int]) -> Tensor:
        """The targets, (..., n, targets); an `ArgumentError` if they have another width than the head was built for."""
        y = super().targets(support_y, ways)
        check_width(y, self.n_targets)
        return y

    def predict(self, support: Tensor, y: Tensor, query: Tensor, query_y: Optional[Tensor]) -> Prediction:
        """
        The decoder's Gaussian over targets, (..., m, targets). With a latent path, the mixture over `samples` draws of
        z or, where `query_y` is given, the prediction of one draw, whose penalty is the KL.
        """
        told = self.tell(support, y, query)
        if self.latent is None:
            return self.read(self.decoder(told))
        pairs = torch.cat([support, y], -1)
        prior = self.latent_law(pairs)
        if query_y is None:
            predictions = [self.decode_latent(told, prior) for _ in range(self.samples)]
            return predictions[0] if self.samples == 1 else Gaussian.mix(predictions)
        posterior = self.latent_law(torch.cat([pairs, torch.cat([query, query_y], -1)], -2))
        prediction = self.decode_latent(told, posterior)
        prediction.penalty = kl_divergence(posterior, prior).mean() / query.shape[-2]
        return prediction

    def tell(self, support: Tensor, y: Tensor, query: Tensor) -> Tensor:
        """What the decoder is told by the deterministic path: a query's feature and its summary of the support."""
        if self.summary is None:
            return query
        return torch.cat([query, self.summary(self.encoder(torch.cat([support, y], -1)), support, query)], -1)

    def decode_latent(self, told: Tensor, law: Independent) -> Gaussian:
        """One draw of z, which all queries share."""
        z = (law.mean + law.stddev * torch.randn_like(law.mean)).unsqueeze(-2)  # rsample writes in place
        return self.read(self.decoder(torch.cat([told, z.expand(*told.shape[:-1], -1)], -1)))

    def read(self, outputs: Tensor) -> Gaussian:
        """The decoder's outputs as a distribution."""
        mean, raw = outputs.chunk(2, -1)
        return Gaussian(mean, self.floor + F.softplus(raw))

    def latent_law(self, pairs: Tensor) -> Independent:
        """q(z | pairs): Bayesian aggregation's posterior, or a normal with pooled parameters."""
        assert self.latent is not None
        mean, raw = self.latent(pairs).chunk(2, -1)
        if self.aggregate == "bayesian":
            mean, variance = bayesian_aggregation(mean, raw)
            scale = variance.sqrt()
        else:
            mean, raw = pool(mean, self.aggregate), pool(raw, self.aggregate)
            scale = 0.1 + 0.9 * raw.sigmoid()
        return Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)


class CNP(NeuralProcess):
    """
    **Description**

    The conditional neural process: encoded pairs (feature, target) of the support are aggregated to a
    summary, and a decoder takes a query's feature and the summary to mean and standard deviation.

    The latent path draws z from q(z | S); in training, where `query_y` is given, from q(z | S, Q), and
    `Prediction.loss` adds KL(q(z | S, Q) || q(z | S)) / m.

    **Arguments**

    * **features** (int) - Dimensions of a feature.
    * **targets** (int, *optional*, default=1) - Dimensions of a target.
    * **width** (int, *optional*, default=64) - Width of all layers and of the summary.
    * **depth** (int, *optional*, default=2) - Layers of the encoder, and hidden ones of the decoder.
    * **aggregate** (str, *optional*, default='mean') - Over the support: 'mean', 'max', or 'bayesian', which
        weighs each example by a learned precision (CNP+BA).
    * **latent** (bool, *optional*, default=False) - Whether there is a latent path.
    * **deterministic** (bool, *optional*, default=True) - Whether there is a deterministic one.
    * **samples** (int, *optional*, default=1) - Draws of z of a prediction, which is their mixture. Training takes one.
    * **floor** (float, *optional*, default=0.01) - The least standard deviation that is predicted.

    **References**

    1. Garnelo et al. 2018. "Conditional Neural Processes."
    2. Volpp et al. 2021. "Bayesian Context Aggregation for Neural Processes."

    **Example**

    ~~~python
    model = EpisodicModel(MLP(1, (64,), activate_last=True), CNP(64, aggregate='bayesian'))
    ~~~
    """

    def __init__(
        self,
        features: int,
        targets: int = 1,
        width: int = 64,
        depth: int = 2,
        aggregate: str = "mean",
        latent: bool = False,
        deterministic: bool = True,
        samples: int = 1,
        floor: float = 0.01,
    ):
        summary = Aggregate(width, aggregate) if deterministic else None
        super().__init__(features, targets, summary, width, depth, aggregate, latent, samples, floor)


class ANP(NeuralProcess):
    """
    **Description**

    The attentive neural process: a `CNP` in which every query has its own summary, by attention to the
    support. Keys and queries are embedded features, values the encoded pairs.

    **Arguments**

    * **heads** (int, *optional*, default=4) - Attention heads; they divide the width.
    * **self_layers** (int, *optional*, default=0) - Layers of self-attention among the support's pairs.
    * **cross_layers** (int, *optional*, default=0) - Layers of cross-attention after the first one.
    * **latent** (bool, *optional*, default=True) - Whether there is a latent path.
    * **aggregate** (str, *optional*, default='mean') - The latent path's.
    * **features, targets, width, depth, samples, floor** - As in `CNP`.

    **References**

    1. Kim et al. 2019. "Attentive Neural Processes."

    **Example**

    ~~~python
    model = EpisodicModel(MLP(1, (64,), activate_last=True), ANP(64, self_layers=2))
    ~~~
    """

    def __init__(
        self,
        features: int,
        targets: int = 1,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        self_layers: int = 0,
        cross_layers: int = 0,
        aggregate: str = "mean",
        latent: bool = True,
        samples: int = 1,
        floor: float = 0.01,
    ):
        summary = CrossAttention(features, width, heads, self_layers, cross_layers)
        super().__init__(features, targets, summary, width, depth, aggregate, latent, samples, floor)
