"""Selective prediction: how large are errors on the queries that a model is most confident of?"""

from pathlib import Path
from typing import Dict, NamedTuple, Union

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError, require


class RiskCoverage(NamedTuple):
    """Coverages 1/n, 2/n, ..., 1 and the mean error of that fraction of examples, the most confident ones, (n,)."""

    coverages: Tensor
    risks: Tensor


def risk_coverage(confidence: Tensor, errors: Tensor) -> RiskCoverage:
    """
    **Description**

    The mean error among the k examples of highest confidence, for every k. Among examples of equal confidence it is the
    expectation over their random order: each has the mean error of all of them.

    **Arguments**

    * **confidence** (Tensor) - The most probable class's probability or a score's negative, (n,).
    * **errors** (Tensor) - Any loss per example, (n,): `guess != y`, or squared errors.

    **Returns** a `RiskCoverage`, in float64.

    **References**

    1. Geifman and El-Yaniv. 2017. "Selective Classification for Deep Neural Networks." NeurIPS.
    """
    if confidence.dim() != 1 or errors.shape != confidence.shape or not len(errors):
        raise ArgumentError(
            f"confidence and errors must be (n,) both, with one example at least; got {tuple(confidence.shape)} and "
            f"{tuple(errors.shape)}. Flatten the episodes first."
        )
    if confidence.isnan().any():
        raise ArgumentError("confidence must not be nan: the network has diverged. Lower its learning rates.")
    if not errors.isfinite().all():
        raise ArgumentError("errors must be finite: give a bounded loss, 0/1 or squared errors.")
    errors = errors.detach().double()
    values, ties, counts = confidence.detach().unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(values), dtype=errors.dtype, device=errors.device).index_add(0, ties, errors)
    expected = (sums / counts).repeat_interleave(counts).flip(0)
    k = torch.arange(1, len(errors) + 1, dtype=errors.dtype, device=errors.device)
    return RiskCoverage(k / len(errors), expected.cumsum(0) / k)


def aurc(confidence: Tensor, errors: Tensor) -> float:
    """
    **Description**

    The area under the risk-coverage curve: the mean of its risks. Lower is better; it is the mean error if confidence
    is uninformative.

    **Arguments**

    * **confidence, errors** - As in `risk_coverage`.

    **Returns** a float.

    **References**

    1. Geifman, Uziel and El-Yaniv. 2019. "Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers." ICLR.

    **Example**

    ~~~python
    confidence, guess = probabilities.max(-1)
    aurc(confidence, guess != y)
    ~~~
    """
    return risk_coverage(confidence, errors).risks.mean().item()


def excess_aurc(confidence: Tensor, errors: Tensor) -> float:
    """E-AURC: the difference between `aurc` and that of the same errors in their best order, with which models of
    different accuracy can be compared; a float, 0 at best."""
    return aurc(confidence, errors) - aurc(-errors.double(), errors)


def plot_risk_coverage(curves: Dict[str, RiskCoverage], path: Union[str, Path]) -> None:
    """Risk-coverage curves in one diagram, by name, as one picture."""
    require("matplotlib", "examples").use("Agg")
    pyplot = require("matplotlib.pyplot", "examples")
    if not curves:
        raise ArgumentError("curves is empty: give one risk_coverage at least.")
    figure, axes = pyplot.subplots(figsize=(4.5, 3.2))
    for name, curve in curves.items():
        axes.plot(curve.coverages.cpu(), curve.risks.cpu(), label=name)
    axes.set(xlim=(0, 1), xlabel="coverage", ylabel="risk")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
