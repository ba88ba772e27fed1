"""Sine-Line: few-shot regression on sines and straight lines, and the Bayes-optimal predictor."""

import math
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional as F

from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number


class Tasks(NamedTuple):
    """B tasks: support (B, shots, 1) and query (B, queries, 1), inputs and noisy targets."""

    x: Tensor
    y: Tensor
    x_query: Tensor
    y_query: Tensor

    @property
    def support(self) -> Tuple[Tensor, Tensor]:
        """Inputs and targets of the support, (x, y)."""
        return self.x, self.y

    @property
    def query(self) -> Tuple[Tensor, Tensor]:
        """Inputs and targets of the query, (x_query, y_query)."""
        return self.x_query, self.y_query


class SineLine:
    """
    **Description**

    Half of the tasks are A sin(x + phi) with A in [0.1, 5] and phi in [0, pi], half are a x + b with a and b in
    [-3, 3]; every target has Gaussian noise of 0.3. The inputs are the points of linspace(-5, 5), of which a
    random few are the support and all others the query. One call draws any number of tasks.

    **Arguments**

    * **shots** (int, *optional*, default=5) - Support points per task.
    * **points** (int, *optional*, default=50) - Points per task; those that are not support are query.
    * **noise** (float, *optional*, default=0.3) - Standard deviation of the noise.

    **References**

    1. Finn et al. 2018. "Probabilistic Model-Agnostic Meta-Learning." NeurIPS.

    **Example**

    ~~~python
    family = SineLine()
    x, y, x_query, y_query = family.sample(20, torch.Generator().manual_seed(0))
    ~~~
    """

    AMPLITUDE, PHASE, SLOPE, INTERCEPT = (0.1, 5.0), (0.0, math.pi), (-3.0, 3.0), (-3.0, 3.0)

    def __init__(self, shots: int = 5, points: int = 50, noise: float = 0.3):
        check_number("shots", shots, 1, whole=True)
        check_number("points", points, 2, whole=True)
        check_number("noise", noise, 0, strict=True)
        if shots >= points:
            raise ArgumentError(f"shots must leave a point for the query: got {shots} of {points} points.")
        self.shots, self.points, self.noise = shots, points, noise
        self.grid = torch.linspace(-5.0, 5.0, points)

    def sample(self, tasks: int, generator: Optional[torch.Generator] = None) -> Tasks:
        """Draws tasks; a seeded generator makes them repeatable."""
        check_number("tasks", tasks, 1, whole=True)

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(tasks, 1, generator=generator)

        is_sine = torch.rand(tasks, 1, generator=generator) < 0.5
        sine = sines(self.grid, uniform(*self.AMPLITUDE), uniform(*self.PHASE))
        line = lines(self.grid, uniform(*self.SLOPE), uniform(*self.INTERCEPT))
        y = torch.where(is_sine, sine, line) + self.noise * torch.randn(tasks, self.points, generator=generator)
        order = torch.rand(tasks, self.points, generator=generator).argsort(-1)
        x, y = self.grid[order].unsqueeze(-1), y.gather(-1, order).unsqueeze(-1)
        return Tasks(x[:, : self.shots], y[:, : self.shots], x[:, self.shots :], y[:, self.shots :])


def sines(x: Tensor, amplitude: Tensor, phase: Tensor) -> Tensor:
    """amplitude * sin(x + phase), of the shape that the arguments broadcast to."""
    return amplitude * torch.sin(x + phase)


def lines(x: Tensor, slope: Tensor, intercept: Tensor) -> Tensor:
    """slope * x + intercept, of the shape that the arguments broadcast to."""
    return slope * x + intercept


class WeightedGaussians(NamedTuple):
    """A mixture of normals of one width: weights (B, 1, cells), means (B, m, cells)."""

    weights: Tensor
    means: Tensor
    scale: Tensor

    @property
    def mean(self) -> Tensor:
        """The mixture's mean, (B, m, 1)."""
        return (self.weights * self.means).sum(-1, keepdim=True)

    def log_prob(self, y: Tensor) -> Tensor:
        """Of targets (B, m, 1), one each: (B, m)."""
        return (self.weights.log() + Normal(self.means, self.scale).log_prob(y)).logsumexp(-1)

    def cdf(self, y: Tensor) -> Tensor:
        """The mixture's distribution function at targets (B, m, 1), of the same shape."""
        levels = (self.weights * Normal(self.means, self.scale).cdf(y)).sum(-1, keepdim=True)
        return levels.clamp(max=1.0)  # but for rounding


class BayesOptimal:
    """
    **Description**

    The posterior predictive of a Sine-Line task under the family it was drawn from, on a grid over both kinds'
    parameters: no predictor has a lower expected squared error or negative log-likelihood, and its quantiles are
    calibrated.

    **Arguments**

    * **family** (SineLine) - Where tasks come from.
    * **resolution** (int, *optional*, default=150) - Grid points per parameter: cells are midpoints of equal intervals.
    * **negligible** (float, *optional*, default=1e-5) - Cells below this part of the best one's weight are left out.

    **Example**

    ~~~python
    prediction = BayesOptimal(family)(x, y, x_query)    # a distribution over (B, queries, 1)
    ~~~
    """

    def __init__(self, family: SineLine, resolution: int = 150, negligible: float = 1e-5):
        check_number("resolution", resolution, 2, whole=True)
        self.family, self.negligible = family, negligible
        middle = (torch.arange(resolution) + 0.5) / resolution

        def cells(first: Tuple[float, float], second: Tuple[float, float]) -> Tuple[Tensor, ...]:
            return torch.meshgrid(*(low + (high - low) * middle for low, high in (first, second)), indexing="ij")

        self._sine, self._line = (
            torch.stack([t.reshape(-1, 1) for t in cells(*ranges)])
            for ranges in ((family.AMPLITUDE, family.PHASE), (family.SLOPE, family.INTERCEPT))
        )

    def _curves(self, x: Tensor) -> Tensor:
        """Every cell's curve at some inputs, (cells, len(x)): sines, then lines."""
        return torch.cat([sines(x, *self._sine), lines(x, *self._line)])

    def _one(self, x: Tensor, y: Tensor, x_query: Tensor) -> Tuple[Tensor, Tensor]:
        """The weights of the cells that matter, and their curves at the query."""
        energy = (self._curves(x) - y).square().sum(-1) / (2 * self.family.noise**2)
        matters = energy < energy.min() - math.log(self.negligible)
        weights = torch.softmax(-energy[matters], 0)
        split = matters.nonzero().squeeze(-1)
        count = self._sine.shape[1]
        sine, line = self._sine[:, split[split < count]], self._line[:, split[split >= count] - count]
        return weights, torch.cat([sines(x_query, *sine), lines(x_query, *line)])

    def __call__(self, x: Tensor, y: Tensor, x_query: Tensor) -> WeightedGaussians:
        """The predictive of B tasks, inputs and targets with shape (B, n, 1)."""
        found = [self._one(*(t.squeeze(-1) for t in task)) for task in zip(x, y, x_query)]
        size = max(len(weights) for weights, _ in found)
        weights = torch.stack([F.pad(weights, (0, size - len(weights))) for weights, _ in found])
        means = torch.stack([F.pad(means, (0, 0, 0, size - len(means))) for _, means in found])
        return WeightedGaussians(weights.unsqueeze(1), means.mT, torch.tensor(self.family.noise))
