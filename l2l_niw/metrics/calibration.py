"""Are a classifier's probabilities the rates at which it is right? Scores, temperature scaling and diagrams."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from l2l_niw.errors import ArgumentError, NoTemperatureError, require
from l2l_niw.utils._checks import check_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 20


def check_predictive(probabilities: Tensor) -> None:
    """Raises an `ArgumentError` unless these are class probabilities, (n, ways)."""
    if probabilities.dim() != 2 or not len(probabilities):
        raise ArgumentError(
            f"probabilities must be (n, ways), with one example at least; got {tuple(probabilities.shape)}. "
            "Flatten the episodes first."
        )
    if probabilities.shape[1] < 2:
        raise ArgumentError(f"probabilities must be of two ways at least; got {tuple(probabilities.shape)}.")
    if not probabilities.isfinite().all():
        raise ArgumentError("probabilities are not all finite: the network has diverged. Lower its learning rates.")
    sums = probabilities.sum(-1)
    if not ((probabilities >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        raise ArgumentError("probabilities must not be negative and must sum to 1: give outputs.softmax(-1).")


def check_labels(y: Tensor, n: int, ways: int) -> None:
    """Raises an `ArgumentError` unless these are n labels of so many ways."""
    if y.shape != (n,):
        raise ArgumentError(f"y must be ({n},), one label per example; got {tuple(y.shape)}. Flatten episodes first.")
    if not (y.dtype == torch.long and ((y >= 0) & (y < ways)).all()):
        raise ArgumentError(f"y must be labels from 0 to {ways - 1}, in torch.long.")


def check_probabilities(probabilities: Tensor, y: Tensor) -> None:
    """Raises an `ArgumentError` unless these are class probabilities, (n, ways), and labels, (n,)."""
    check_predictive(probabilities)
    check_labels(y, *probabilities.shape)


def below_one(probabilities: Tensor) -> Tensor:
    """
    Probabilities in float32, with the next number below 1 in place of 1: torchmetrics would give a probability of 1 a
    bin of its own, and take one that rounding has put above 1 for a sign of logits.
    """
    return probabilities.float().clamp(max=1.0 - 2.0**-24)


def ece(probabilities: Tensor, y: Tensor, bins: int = BINS) -> float:
    """
    **Description**

    The expected calibration error: the difference between confidence in the most probable class and the rate at which
    it is the right one, in bins of equal width, averaged over examples.

    **Arguments**

    * **probabilities** (Tensor) - (n, ways).
    * **y** (Tensor) - Labels, (n,).
    * **bins** (int, *optional*, default=20) - The paper's number.

    **Returns** a float between 0 and 1.

    **References**

    1. Guo et al. 2017. "On Calibration of Modern Neural Networks." ICML.
    """
    check_number("bins", bins, 1, whole=True)
    check_probabilities(probabilities, y)
    metric = require("torchmetrics.functional.classification", "vision").multiclass_calibration_error
    return metric(below_one(probabilities), y, num_classes=probabilities.shape[1], n_bins=bins, norm="l1").item()


def ece_all(probabilities: Tensor, y: Tensor, bins: int = BINS) -> float:
    """
    **Description**

    The expected calibration error of every class's probability, whether it is the most probable one or not: with 5 ways
    each example counts five times, and its small probabilities are checked too.

    **Arguments**

    * **probabilities, y, bins** - As in `ece`.

    **Returns** a float between 0 and 1.
    """
    check_number("bins", bins, 1, whole=True)
    check_probabilities(probabilities, y)
    metric = require("torchmetrics.functional.classification", "vision").binary_calibration_error
    hits = F.one_hot(y, probabilities.shape[1])
    return metric(below_one(probabilities).flatten(), hits.flatten(), n_bins=bins, norm="l1").item()


def nll(probabilities: Tensor, y: Tensor) -> float:
    """The mean negative log-likelihood, a float; infinite where the right class was given no chance at all."""
    check_probabilities(probabilities, y)
    return -probabilities.gather(1, y.unsqueeze(1)).double().log().mean().item()


def brier(probabilities: Tensor, y: Tensor) -> float:
    """The mean squared distance between probabilities and the right answer's, a float between 0 and 2."""
    check_probabilities(probabilities, y)
    return (probabilities - F.one_hot(y, probabilities.shape[1])).square().sum(-1).mean().item()


def accuracy(probabilities: Tensor, y: Tensor) -> float:
    """The fraction of examples whose most probable class is the right one, a float."""
    check_probabilities(probabilities, y)
    return (probabilities.argmax(-1) == y).double().mean().item()


def fit_temperature(probabilities: Tensor, y: Tensor) -> float:
    """
    **Description**

    The temperature T at which probabilities proportional to p^(1/T) explain the labels best: those of a softmax, or an
    average of several. Fit it on validation episodes, never on the test's. Where none is best, `NoTemperatureError`.

    **Arguments**

    * **probabilities** (Tensor) - (n, ways).
    * **y** (Tensor) - Labels, (n,).

    **Returns** T, a float above 0.

    **Example**

    ~~~python
    temperature = fit_temperature(validation_probabilities, validation_y)
    ece(at_temperature(probabilities, temperature), y)
    ~~~
    """
    check_probabilities(probabilities, y)
    logits = _logits(probabilities)
    own = logits.gather(1, y.unsqueeze(1))
    if (own >= logits).all() or (own - logits).mean() <= 0:
        raise NoTemperatureError(
            "probabilities: no temperature is best, since either every label is the most probable one, and colder is "
            "always better, or labels are no more probable than others, and hotter is. Fit it on more episodes."
        )
    scale = (own - logits).std()  # at which the search begins, or it would end at once where all is nearly even
    logits = logits / scale
    log_t = torch.zeros((), dtype=torch.float64, device=logits.device, requires_grad=True)
    precise: Dict[str, Any] = {"max_iter": 100, "tolerance_grad": 1e-9, "tolerance_change": 1e-14}
    optimiser = torch.optim.LBFGS([log_t], line_search_fn="strong_wolfe", **precise)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(logits / log_t.exp(), y)
        loss.backward()
        return loss

    optimiser.step(closure)
    return (scale * log_t.exp()).item()


def at_temperature(probabilities: Tensor, temperature: float) -> Tensor:
    """Probabilities proportional to p^(1/temperature), of the same shape."""
    check_number("temperature", temperature, 0, strict=True)
    return (_logits(probabilities) / temperature).softmax(-1).to(probabilities.dtype)


def _logits(probabilities: Tensor) -> Tensor:
    """Of a probability of 0 in its own precision, the logarithm of the least that it can hold."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).double().log()


class Reliability(NamedTuple):
    """Bins of equal width on the confidence in the most probable class: bounds (bins + 1,), and of each bin the mean
    confidence, the rate of right answers (nan where it is empty) and the number of data."""

    bounds: Tensor
    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def reliability(probabilities: Tensor, y: Tensor, bins: int = BINS) -> Reliability:
    """What a reliability diagram shows, as a `Reliability` of so many bins."""
    check_number("bins", bins, 1, whole=True)
    check_probabilities(probabilities, y)
    confidence, guess = below_one(probabilities).max(-1)
    bounds = torch.linspace(0, 1, bins + 1, device=confidence.device)
    which = torch.bucketize(confidence, bounds, right=True) - 1
    counts = torch.bincount(which, minlength=bins)

    def mean(values: Tensor) -> Tensor:
        return torch.zeros(bins, dtype=torch.float64, device=y.device).index_add(0, which, values.double()) / counts

    return Reliability(bounds, mean(confidence), mean(guess == y), counts)


def scores(probabilities: Tensor, y: Tensor, temperature: Optional[float] = None) -> Dict[str, float]:
    """
    **Description**

    Accuracy, ECE, its all-class variant, NLL and Brier score, and with a temperature ECE and NLL at it.

    **Arguments**

    * **probabilities** (Tensor) - (n, ways).
    * **y** (Tensor) - Labels, (n,).
    * **temperature** (float, *optional*, default=None) - From `fit_temperature`.

    **Returns** a dict of `accuracy`, `ece`, `ece_all`, `nll` and `brier`, and with a temperature of `ece_ts`, `nll_ts`
    and `temperature` too.
    """
    found = {score.__name__: score(probabilities, y) for score in (accuracy, ece, ece_all, nll, brier)}
    if temperature is not None:
        scaled = at_temperature(probabilities, temperature)
        found = {**found, "ece_ts": ece(scaled, y), "nll_ts": nll(scaled, y), "temperature": temperature}
    return found


def draw_reliability(found: Reliability, axes: "Axes", title: str = "") -> None:
    """A reliability diagram with the number of data of each bin, on an axis of its own, drawn into matplotlib axes."""
    left, width = found.bounds[:-1].cpu(), (found.bounds[1:] - found.bounds[:-1]).cpu()
    axes.bar(left, found.accuracy.nan_to_num().cpu(), width, align="edge", edgecolor="white", color="C0", alpha=0.6)
    known = (found.counts > 0).cpu()
    axes.plot(found.confidence.cpu()[known], found.accuracy.cpu()[known], "k.", markersize=4)
    axes.plot([0, 1], [0, 1], "k--", linewidth=0.8)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", title=title)
    axes.set_ylabel("rate of right answers", color="C0")
    numbers = axes.twinx()
    numbers.stairs(found.counts.cpu(), found.bounds.cpu(), color="C1")
    numbers.set_ylim(0, 1.05 * found.counts.max().item())
    numbers.ticklabel_format(axis="y", style="sci", scilimits=(0, 3))
    numbers.set_ylabel("data in the bin", color="C1")


def plot_reliability(diagrams: Dict[str, Reliability], path: Union[str, Path], columns: int = 4) -> None:
    """Reliability diagrams side by side, by title, as one picture."""
    require("matplotlib", "examples").use("Agg")
    pyplot = require("matplotlib.pyplot", "examples")
    if not diagrams:
        raise ArgumentError("diagrams is empty: give one reliability at least.")
    columns = min(columns, len(diagrams))
    rows = -(-len(diagrams) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.7 * columns, 3.2 * rows), squeeze=False)
    for ax, (title, found) in zip(axes.flat, diagrams.items()):
        draw_reliability(found, ax, title)
    for ax in axes.flat[len(diagrams) :]:
        ax.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
