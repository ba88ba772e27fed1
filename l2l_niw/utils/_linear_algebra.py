"""Regularised least squares in the smaller of n and d, stable in float32."""

import math

import torch
from torch import Tensor

from l2l_niw.errors import LossError


def ridge_factor(phi: Tensor, lam: Tensor) -> Tensor:
    """The Cholesky factor of phi phi^T + lam I or of phi^T phi + lam I, whichever is smaller."""
    n, d = phi.shape[-2:]
    gram = phi @ phi.mT if n <= d else phi.mT @ phi
    return cholesky(gram + lam * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))


def cholesky(regularised: Tensor) -> Tensor:
    """The Cholesky factor of a head's Gram matrix, or an error that says what to do."""
    try:
        return torch.linalg.cholesky(regularised)
    except torch.linalg.LinAlgError as error:
        raise LossError(
            "the head's regularised Gram matrix is not positive definite: features are not finite, or so large "
            "that the regulariser is lost beside them. Normalise the features, or raise what regularises them "
            "(Ridge's lam, BayesianRidge's noise, MetaQDA's spread)."
        ) from error


def ridge_weights(phi: Tensor, lower: Tensor, y: Tensor) -> Tensor:
    """(phi^T phi + lam I)^-1 phi^T y, from `ridge_factor`."""
    n, d = phi.shape[-2:]
    return phi.mT @ torch.cholesky_solve(y, lower) if n <= d else torch.cholesky_solve(phi.mT @ y, lower)


def ridge_spread(phi: Tensor, lower: Tensor, query: Tensor, lam: Tensor) -> Tensor:
    """q^T (phi^T phi + lam I)^-1 q for each row q of the query, as a sum of squares: it cannot turn negative."""
    n, d = phi.shape[-2:]
    if n <= d:
        weights = torch.cholesky_solve(phi @ query.mT, lower)
        residual = query - weights.mT @ phi
        return residual.square().sum(-1) / lam + weights.square().sum(-2)
    return torch.linalg.solve_triangular(lower, query.mT, upper=False).square().sum(-2)


def log_determinant(lower: Tensor) -> Tensor:
    """log |L L^T|."""
    return 2.0 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def log_marginal(phi: Tensor, y: Tensor, variance: Tensor) -> Tensor:
    """
    **Description**

    log N(y; 0, phi phi^T + variance I), summed over the columns of y, (..., n, targets), in the smaller of n
    and d, with

    $$y^T (\\phi\\phi^T + \\sigma^2 I)^{-1} y = |y - \\phi w|^2 / \\sigma^2 + |w|^2, \\qquad
    w = (\\phi^T\\phi + \\sigma^2 I)^{-1} \\phi^T y,$$

    a sum of squares where Woodbury's difference would cancel.
    """
    n, d = phi.shape[-2:]
    lower = ridge_factor(phi, variance)
    weights = ridge_weights(phi, lower, y)
    fit = ((y - phi @ weights).square().sum((-2, -1)) / variance) + weights.square().sum((-2, -1))
    volume = log_determinant(lower) + max(n - d, 0) * variance.log()
    return -0.5 * (fit + y.shape[-1] * (volume + n * math.log(2.0 * math.pi)))
