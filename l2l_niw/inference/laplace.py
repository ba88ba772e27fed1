"""An episode's Gaussian posterior in the prior's own coordinates, with its full covariance, by Gauss-Newton steps.

In coordinates z in which the prior is N(0, I), an episode whose loss has the Gauss-Newton matrix W^T W, W of as many
rows as the support has outputs, has the posterior N(z, S), S = (I + W^T W)^-1: Eq. 13 without the diagonal
approximation of A. Everything is computed in the smaller of the two sizes of W.
"""

from typing import Any, Dict, NamedTuple

import torch
from torch import Tensor

from l2l_niw.inference.wishart import log_determinant_gap
from l2l_niw.utils._linear_algebra import log_determinant

RADIUS = 2.0  # the longest step, in standard deviations of the prior


class Spread(NamedTuple):
    """
    **Description**

    S = (I + W^T W)^-1, the covariance of one episode or, with leading dimensions, of several.

    * `w` - W, (..., outputs, coordinates).
    * `lower` - The Cholesky factor of I + W^T W or of I + W W^T, whichever is smaller.
    """

    w: Tensor
    lower: Tensor

    @property
    def primal(self) -> bool:
        """Whether `lower` is of the coordinates' size, rather than of the outputs'."""
        return self.w.shape[-1] <= self.w.shape[-2]

    def detached(self) -> "Spread":
        """The same without a graph."""
        return Spread(self.w.detach(), self.lower.detach())

    def times(self, vectors: Tensor) -> Tensor:
        """S v of column vectors, (..., coordinates, columns)."""
        if self.primal:
            return torch.cholesky_solve(vectors, self.lower)
        return vectors - self.w.mT @ torch.cholesky_solve(self.w @ vectors, self.lower)

    def log_determinant(self) -> Tensor:
        """log |S|, by Sylvester's identity in either size."""
        return -log_determinant(self.lower)

    def trace(self) -> Tensor:
        """The trace of S."""
        outputs, coordinates = self.w.shape[-2:]
        identity = torch.eye(self.lower.shape[-1], dtype=self.w.dtype, device=self.w.device)
        inverse = torch.linalg.solve_triangular(self.lower, identity.expand_as(self.lower), upper=False)
        return inverse.square().sum((-2, -1)) + (0 if self.primal else coordinates - outputs)

    def draw(self) -> Tensor:
        """A reparametrised draw from N(0, S), (..., coordinates): by Matheron's rule where outputs are fewer."""
        noise = torch.randn(self.w.shape[:-2] + self.w.shape[-1:], dtype=self.w.dtype, device=self.w.device)
        if self.primal:
            return torch.linalg.solve_triangular(self.lower.mT, noise.unsqueeze(-1), upper=True).squeeze(-1)
        seen = (self.w @ noise.unsqueeze(-1)).squeeze(-1)
        seen = (seen + torch.randn_like(seen)).unsqueeze(-1)
        return noise - (self.w.mT @ torch.cholesky_solve(seen, self.lower)).squeeze(-1)

    def variances(self, jacobian: Tensor) -> Tensor:
        """The diagonal of J S J^T, (..., rows), as a sum of squares: it cannot turn negative."""
        if self.primal:
            half = torch.linalg.solve_triangular(self.lower, jacobian.mT, upper=False)
            return half.square().sum(-2)
        gain = torch.cholesky_solve(self.w @ jacobian.mT, self.lower)
        rest = jacobian.mT - self.w.mT @ gain
        return rest.square().sum(-2) + gain.square().sum(-2)

    def covariance(self) -> Tensor:
        """S itself, (..., coordinates, coordinates)."""
        size = self.w.shape[-1]
        identity = torch.eye(size, dtype=self.w.dtype, device=self.w.device)
        return self.times(identity.expand(*self.w.shape[:-2], size, size))


def spread(w: Tensor) -> Spread:
    """The posterior's covariance from a square root of its Gauss-Newton matrix."""
    outputs, coordinates = w.shape[-2:]
    gram = w.mT @ w if coordinates <= outputs else w @ w.mT
    identity = torch.eye(gram.shape[-1], dtype=w.dtype, device=w.device)
    return Spread(w, torch.linalg.cholesky(gram + identity))


def gauss_newton(z: Tensor, gradient: Tensor, found: Spread, radius: float = RADIUS) -> Tensor:
    """
    **Description**

    The minimiser of the quadratic model of l_i(z) + |z|^2 / 2 around z, or where a step of the length `radius` ends on
    the way to it:

    $$z \\gets z - S\\,(\\nabla l_i(z) + z).$$

    On a linear model with Gaussian noise one step is exact, but for the radius.

    **Arguments**

    * **z** (Tensor) - Where the loss was linearised, (..., coordinates).
    * **gradient** (Tensor) - Of l_i there, of the same shape.
    * **found** (Spread) - S there.
    * **radius** (float, *optional*, default=2.0) - In standard deviations of the prior.
    """
    move = -found.times((gradient + z).unsqueeze(-1)).squeeze(-1)
    length = torch.linalg.vector_norm(move, dim=-1, keepdim=True)
    return z + move * (radius / length.clamp(min=radius))


def expected_kl(z: Tensor, found: Spread, n0: Tensor, wishart: str) -> Tensor:
    """
    **Description**

    \\(\\mathbb{E}_{q(\\phi)} KL(q_i || p(\\theta|\\phi))\\) in the prior's coordinates, summed over episodes: the KL of
    N(z, S) to N(0, I) plus what not knowing Sigma costs in as many dimensions.
    """
    kl = found.trace() + z.square().sum(-1) - z.shape[-1] - found.log_determinant()
    gap = log_determinant_gap(n0, z.shape[-1], wishart)
    return 0.5 * (kl.sum() + max(kl.numel(), 1) * gap.to(kl.dtype))


def log_evidence(nll: Tensor, z: Tensor, found: Spread) -> Tensor:
    """
    **Description**

    Laplace's approximation of log p(S), each episode's, from its summed negative log-likelihood at z: exact where the
    network is linear in its weights and the noise is Gaussian.

    $$\\log p(S) \\approx -l_i(z) - \\tfrac12 |z|^2 + \\tfrac12 \\log|S|.$$
    """
    return 0.5 * (found.log_determinant() - z.square().sum(-1)) - nll


def jacobian(outputs: Tensor, z: Tensor, create_graph: bool) -> Tensor:
    """
    **Description**

    d outputs / d z, (..., outputs, coordinates), of one episode or of several that do not depend on each other, by the
    cheaper way: a backward for each output, all at once, or two for each coordinate.

    **Arguments**

    * **outputs** (Tensor) - (..., outputs), with a graph to z.
    * **z** (Tensor) - (..., coordinates).
    * **create_graph** (bool) - Whether the result has a graph.
    """
    if outputs.shape[-1] <= 2 * z.shape[-1]:
        return pulled_back(outputs, z, one_hots(outputs), create_graph).movedim(0, -2)
    zeros = torch.zeros_like(outputs, requires_grad=True)
    pulled = torch.autograd.grad(outputs, z, zeros, create_graph=True)[0]
    return pulled_back(pulled, zeros, one_hots(pulled), create_graph).movedim(0, -1)


def pulled_back(outputs: Tensor, inputs: Tensor, vectors: Tensor, create_graph: bool) -> Tensor:
    """Vector-Jacobian products of several vectors, at once or, where an operation cannot be batched, in turn."""
    options: Dict[str, Any] = {"retain_graph": True, "create_graph": create_graph}
    try:
        return torch.autograd.grad(outputs, inputs, vectors, is_grads_batched=True, **options)[0]
    except RuntimeError:  # if it was not the batch's doing, this raises it again
        return torch.stack([torch.autograd.grad(outputs, inputs, vector, **options)[0] for vector in vectors])


def one_hots(like: Tensor) -> Tensor:
    """Every unit vector of the last dimension, (size, ..., size)."""
    size = like.shape[-1]
    units = torch.eye(size, dtype=like.dtype, device=like.device)
    return units.view(size, *[1] * (like.dim() - 1), size).expand(size, *like.shape)
