"""What a head says of targets: distributions that know their negative log-likelihood and how to be averaged."""

import math
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Normal, constraints

from l2l_niw.errors import ArgumentError
from l2l_niw.heads.labels import Labels
from l2l_niw.utils._linear_algebra import log_marginal

Shape = Union[torch.Size, List[int], Tuple[int, ...]]


def check_targets(y: Tensor, shape: torch.Size) -> None:
    """Raises an `ArgumentError` unless the targets are a tensor of this shape."""
    if not isinstance(y, Tensor):
        raise ArgumentError(f"query_y must be a tensor, got {type(y).__name__}; use torch.as_tensor.")
    if y.shape != shape:
        raise ArgumentError(f"query_y has shape {tuple(y.shape)}, but the prediction is of shape {tuple(shape)}.")


class Prediction(Distribution):
    """
    **Description**

    A `torch.distributions.Distribution` over an episode's targets. `nll` is its mean negative
    log-likelihood per example; `loss`, what training minimises, adds what the head asks for beside it.
    """

    penalty: Union[float, Tensor] = 0.0

    @property
    def n(self) -> int:
        """The number of data."""
        return self.batch_shape.numel()

    def nll(self, y: Tensor) -> Tensor:
        """Mean over the data of -log p(y)."""
        check_targets(y, self.batch_shape + self.event_shape)
        return -self.log_prob(y).sum() / self.n

    def loss(self, y: Tensor) -> Tensor:
        """`nll` and the head's penalty: a contrastive term, a latent's KL."""
        return self.nll(y) + self.penalty

    def tensors(self) -> Tuple[Tensor, ...]:
        """What `rebuild` needs, with any leading dimensions."""
        raise ArgumentError(f"{type(self).__name__} is no prediction of a query; use each network's own nll.")

    @classmethod
    def rebuild(cls, *tensors: Tensor) -> "Prediction":
        """A prediction of this class from what `tensors` returned."""
        return cls(*tensors)  # type: ignore[arg-type]

    @classmethod
    def mix(cls, parts: Sequence[Any], log_weights: Optional[Tensor] = None) -> "Prediction":
        """The average of several networks' predictive densities, equal or by weights, (networks,) or (B, networks)."""
        raise ArgumentError(f"{cls.__name__} cannot be averaged over networks; use each network's own nll.")


class Classes(Prediction, Categorical):
    """
    **Description**

    A categorical over the support's labels, whatever integers they are: `log_prob` takes labels,
    `sample` and `mode` give labels. The columns of `logits` and `probs` are the labels in sorted order.

    **Arguments**

    * **logits** (Tensor) - (..., m, ways).
    * **labels** (Labels) - The support's.
    """

    def __init__(self, logits: Tensor, labels: Labels):
        self.labels = labels
        logits = logits.masked_fill(~labels.present.unsqueeze(-2), -math.inf)
        overfull = ~labels.onehot.any(-1).all(-1)  # more classes than ways
        super().__init__(logits=logits.masked_fill(overfull[..., None, None], math.nan), validate_args=False)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-probabilities of labels, (..., m). One that the support lacks raises or, with `ways` given, has -inf."""
        found = self.labels.match(y)
        value = torch.where(found, self.logits, 0.0).sum(-1)
        return torch.where(found.any(-1), value, -math.inf)

    def _label(self, column: Tensor) -> Tensor:
        classes = self.labels.classes.unsqueeze(-2).expand(*column.shape, -1)
        return classes.gather(-1, column.unsqueeze(-1)).squeeze(-1)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        """Sampled labels, of shape sample_shape + (..., m)."""
        return self._label(super().sample(torch.Size(sample_shape)))

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Every label, (ways, ..., m): classes differ between the episodes of a batch, so always expanded."""
        columns = torch.arange(self.labels.ways, device=self.logits.device)
        return self._label(columns.view(-1, *[1] * len(self.batch_shape)).expand(-1, *self.batch_shape))

    @property
    def support(self) -> constraints.Constraint:
        """The integers from the lowest label to the highest: an interval that holds all classes."""
        classes = self.labels.classes
        return constraints.integer_interval(classes.min(), classes.max())

    @property
    def mode(self) -> Tensor:
        """The most probable labels, (..., m)."""
        return self._label(self.logits.argmax(-1))

    def tensors(self) -> Tuple[Tensor, ...]:
        """The logits, (..., m, ways), and the classes, `present` and `onehot` of the labels."""
        return self.logits, self.labels.classes, self.labels.present, self.labels.onehot

    @classmethod
    def rebuild(cls, *tensors: Tensor) -> "Classes":
        """A prediction from what `tensors` returned; a label that the support lacks raises."""
        logits, classes, present, onehot = tensors
        return cls(logits, Labels(classes, present, onehot, checked=True))

    @classmethod
    def mix(cls, parts: Sequence["Classes"], log_weights: Optional[Tensor] = None) -> "Classes":
        """The average of several networks' class probabilities, (..., m, ways)."""
        labels = parts[0].labels
        logits = torch.stack([part.logits for part in parts])
        # an empty column's log 0 has no gradient to average; the constructor empties it again
        logits = logits.masked_fill(~labels.present.unsqueeze(-2), 0.0)
        if log_weights is None:
            return cls(logits.logsumexp(0) - math.log(len(parts)), labels)
        own = log_weights.to(logits.dtype)[..., None, None, :].movedim(-1, 0)
        return cls((logits + own).logsumexp(0), labels)


class Gaussian(Prediction, Independent):
    """
    **Description**

    Independent normals over the dimensions of a target, (..., m, targets).

    **Arguments**

    * **mean** (Tensor) - (..., m, targets).
    * **scale** (Tensor) - Standard deviation, of a shape that broadcasts to the mean's.
    """

    def __init__(self, mean: Tensor, scale: Tensor):
        super().__init__(Normal(mean, scale.expand_as(mean), validate_args=False), 1, validate_args=False)

    def tensors(self) -> Tuple[Tensor, ...]:
        """Means and standard deviations, (..., m, targets)."""
        return self.mean, self.stddev

    def cdf(self, y: Tensor) -> Tensor:
        """Of each dimension of a target, (..., m, targets)."""
        return self.base_dist.cdf(y)

    @classmethod
    def mix(cls, parts: Sequence["Gaussian"], log_weights: Optional[Tensor] = None) -> "GaussianMixture":
        """A mixture with one component per network."""
        means, scales = (torch.stack([getattr(p, which) for p in parts], -2) for which in ("mean", "stddev"))
        if log_weights is not None:
            log_weights = log_weights.to(means.dtype).unsqueeze(-2).expand(means.shape[:-1])
        return GaussianMixture(means, scales, log_weights)


class GaussianMixture(Prediction, MixtureSameFamily):
    """
    **Description**

    A mixture of independent normals: what several networks, several draws of a latent, or several linear layers say.

    **Arguments**

    * **means** (Tensor) - (..., m, components, targets).
    * **scales** (Tensor) - Standard deviations, of the same shape.
    * **log_weights** (Tensor, *optional*, default=None) - (..., m, components). Equal if not given.
    """

    def __init__(self, means: Tensor, scales: Tensor, log_weights: Optional[Tensor] = None):
        log_weights = torch.zeros_like(means[..., 0]) if log_weights is None else log_weights
        parts = Independent(Normal(means, scales, validate_args=False), 1, validate_args=False)
        super().__init__(Categorical(logits=log_weights, validate_args=False), parts, validate_args=False)

    @property
    def _normals(self) -> Normal:
        return self.component_distribution.base_dist  # type: ignore[attr-defined]

    def tensors(self) -> Tuple[Tensor, ...]:
        """Means and standard deviations, (..., m, components, targets), and log-weights, (..., m, components)."""
        return self._normals.loc, self._normals.scale, self.mixture_distribution.logits

    def cdf(self, y: Tensor) -> Tensor:
        """Of each dimension of a target, (..., m, targets)."""
        levels = self._normals.cdf(y.unsqueeze(-2))
        return (self.mixture_distribution.probs.unsqueeze(-1) * levels).sum(-2).clamp(max=1.0)  # but for rounding

    @classmethod
    def mix(cls, parts: Sequence["GaussianMixture"], log_weights: Optional[Tensor] = None) -> "GaussianMixture":
        """A mixture of all networks' components."""
        means, scales, own = zip(*(part.tensors() for part in parts))
        if log_weights is not None:
            own = tuple(part + log_weights.to(part.dtype)[..., None, k, None] for k, part in enumerate(own))
        return cls(torch.cat(means, -2), torch.cat(scales, -2), torch.cat(own, -1))


class LeftOut(Prediction):
    """
    **Description**

    Predictions of n data, each of its own episode of the others.

    **Arguments**

    * **each** (Prediction) - Of episodes (..., n) with a query of one.
    """

    arg_constraints = {}

    def __init__(self, each: Prediction):
        self.each = each
        self._place = -1 - len(each.event_shape)  # of the query of one
        super().__init__(each.batch_shape[:-1], each.event_shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Means, (..., n, targets)."""
        return self.each.mean.squeeze(self._place)

    @property
    def stddev(self) -> Tensor:
        """Standard deviations, (..., n, targets)."""
        return self.each.stddev.squeeze(self._place)

    @property
    def probs(self) -> Tensor:
        """Class probabilities, (..., n, ways)."""
        return self.each.probs.squeeze(-2)  # type: ignore[attr-defined]

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y_i | the other examples), (..., n)."""
        return self.each.log_prob(y.unsqueeze(self._place)).squeeze(-1)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        """Samples of each example's own prediction, of shape sample_shape + (..., n) or (..., n, targets)."""
        return self.each.sample(sample_shape).squeeze(self._place)


class Evidence(Prediction):
    """
    **Description**

    The marginal likelihood of all of a support's targets at once, N(0, U U^T + noise^2 I) for each
    dimension of the target. Its `nll` is its share per example.

    **Arguments**

    * **factor** (Tensor) - U, (..., n, d); the smaller of n and d is the size of what is inverted.
    * **noise** (Tensor) - Standard deviation of the noise, a scalar.
    * **targets** (int) - Dimensions of a target.
    """

    arg_constraints = {}

    def __init__(self, factor: Tensor, noise: Tensor, targets: int):
        self.factor, self.noise = factor, noise
        super().__init__(factor.shape[:-2], torch.Size((factor.shape[-2], targets)), validate_args=False)

    @property
    def n(self) -> int:
        """The number of examples in all episodes."""
        return self.batch_shape.numel() * self.event_shape[0]

    def log_prob(self, y: Tensor) -> Tensor:
        """The log marginal likelihood of each episode's targets, (...), from targets (..., n, targets)."""
        return log_marginal(self.factor, y.to(self.factor), self.noise.square()).to(y.dtype)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        """Targets of the whole support, sampled jointly, of shape sample_shape + (..., n, targets)."""
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad():  # as a decorator, torch.compile could not read it
            weights = torch.randn(*shape, self.factor.shape[-1], self.event_shape[1]).to(self.factor)
            return self.factor @ weights + self.noise * torch.randn(*shape, *self.event_shape).to(self.factor)


class EvidenceMixture(Prediction):
    """
    **Description**

    A mixture of evidences, each around a mean of its own.

    **Arguments**

    * **parts** (Evidence) - Of episodes (..., components).
    * **means** (Tensor) - (..., components, n, targets).
    * **log_weights** (Tensor) - (..., components), of which each episode's sum to one.
    """

    arg_constraints = {}

    def __init__(self, parts: Evidence, means: Tensor, log_weights: Tensor):
        self.parts, self.means, self.log_weights = parts, means, log_weights
        super().__init__(parts.batch_shape[:-1], parts.event_shape, validate_args=False)

    @property
    def n(self) -> int:
        """The number of examples in all episodes."""
        return self.batch_shape.numel() * self.event_shape[0]

    def joint(self, y: Tensor) -> Tensor:
        """log p(y, component), (..., components)."""
        return self.log_weights + self.parts.log_prob(y.unsqueeze(-3) - self.means).to(self.log_weights.dtype)

    def log_prob(self, y: Tensor) -> Tensor:
        """The log marginal likelihood of each episode's targets under the mixture, (...)."""
        return self.joint(y).logsumexp(-1)

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        """Targets of the whole support, from one component per episode, of shape sample_shape + (..., n, targets)."""
        with torch.no_grad():
            drawn = self.means + self.parts.sample(sample_shape)
            weights = self.log_weights.expand(drawn.shape[:-2])
            which = Categorical(logits=weights, validate_args=False).sample()[..., None, None, None]
            drawn = drawn.gather(-3, which.expand(*which.shape[:-2], *self.event_shape)).squeeze(-3)
            return drawn.to(self.log_weights.dtype)
