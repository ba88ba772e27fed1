"""Where targets live: the circle, rotations, the plane. What networks are given of them, errors, and densities."""

import math
from dataclasses import dataclass, field
from typing import Callable, Dict, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from l2l_niw.metrics import angular_error, pixel_distance, projected_normal, quaternion_distance, rotation_error
from l2l_niw.heads.predictions import GaussianMixture


class Components(NamedTuple):
    """
    A mixture of independent normals, of each target: what every method predicts.

    * `means`, `scales` - (..., m, components, targets).
    * `log_weights` - (..., m, components).
    """

    means: Tensor
    scales: Tensor
    log_weights: Tensor

    def mean(self):
        return (self.log_weights.softmax(-1).unsqueeze(-1) * self.means).sum(-2)

    def sample(self, count):
        return GaussianMixture(*self).sample((count,))


def components_of(prediction):
    """A Gaussian or a mixture of them, in double precision: densities of narrow ones need it."""
    if not isinstance(prediction, GaussianMixture):
        mean, scale = prediction.tensors()
        parts = mean.unsqueeze(-2), scale.unsqueeze(-2), torch.zeros_like(mean[..., :1])
    else:
        parts = prediction.tensors()
    return Components(*(part.double() for part in parts))


@dataclass(frozen=True)
class Space:
    """
    A space of poses. Predictions are Gaussians around what networks are given, `encode(y)`; what is scored is the law
    of the pose that follows from them.

    * `width` - Of a target.
    * `errors` - Of points, by title; the first is the paper's, which searches go by.
    * `directional` - Whether targets are of length 1: the law is the projected normal. `antipodal` as of that.
    * `middle`, `unit` - What is taken off targets, and what they are divided by.
    * `density` - What a density is per.
    """

    width: int
    errors: Dict[str, Callable] = field(hash=False)
    density: str
    directional: bool = True
    antipodal: bool = False
    middle: float = 0.0
    unit: float = 1.0

    def encode(self, y):
        return (y - self.middle) / self.unit

    def decode(self, y):
        """A pose from what a network says: on its sphere, or in pixels."""
        return F.normalize(y, dim=-1) if self.directional else self.middle + self.unit * y

    def log_density(self, found: Components, y):
        """Of poses, (..., targets)."""
        if self.directional:
            return projected_normal(F.normalize(y.double(), dim=-1), *found, antipodal=self.antipodal)
        logs = GaussianMixture(*found).log_prob(self.encode(y.double()))
        return logs - self.width * math.log(self.unit)


def space_of(kind, size):
    """The space of the tasks' kind of targets; positions are centred, and of about unit variance."""
    if kind == "vector":
        return Space(2, {"degrees": angular_error}, "radian")
    if kind == "quaternion":
        scaled = {"quaternion x 100": lambda p, y: 100 * quaternion_distance(p, y), "degrees": rotation_error}
        return Space(4, scaled, "unit of the sphere of quaternions", antipodal=True)
    return Space(2, {"pixels": pixel_distance}, "pixel", False, middle=(size - 1) / 2, unit=size / 4)
