"""
Split conformal prediction over tasks: sets that hold a new task's target with a given probability, whatever the model.

What is exchangeable are tasks. Queries of one task share its support and its difficulty, so that many queries of few
tasks say little of a new task, and the usual threshold, which takes all queries as exchangeable, can undercover. Here
each of K validation tasks has a mass of 1/(K + 1), spread evenly over its queries, and the new task's is at infinity:
hierarchical conformal prediction. The target of a new task's query is then in its set with a probability of at least
`level`, and of at most level + 2/(K + 1) if scores have no ties. This is marginal, over validation tasks, the new task
and its query; it does not hold for each task. Tasks that were used for training, for choosing hyperparameters or for
fitting a temperature are not exchangeable with new ones: calibrate on others.

**References**

1. Lee, Barber and Willett. 2023. "Distribution-free inference with hierarchical data." arXiv:2306.06342.
2. Dunn, Wasserman and Ramdas. 2023. "Distribution-Free Prediction Sets for Two-Layer Hierarchical Models." JASA.
"""

import math
from typing import Callable, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError
from l2l_niw.metrics.calibration import check_labels, check_predictive, check_probabilities
from l2l_niw.metrics.regression import quantile


def conformal_threshold(scores: Union[Tensor, Sequence[Tensor]], level: float) -> float:
    """
    **Description**

    The `level`-quantile of validation scores, where each task has a mass of 1/(K + 1), spread evenly over its queries,
    and infinity has the rest. It is infinite where 1 - level is below 1/(K + 1): too few tasks for that level.

    Any score will do that is higher the less a target fits: `label_scores`, `cdf_scores`, or standardised residuals,
    (y - mean).abs() / stddev, whose interval is mean +- threshold * stddev.

    **Arguments**

    * **scores** (Tensor or list of Tensor) - Of targets of validation tasks: (tasks, queries), or one tensor per task.
    * **level** (float) - The probability that a new task's target is in its set, between 0 and 1.

    **Returns** the threshold, a float, perhaps infinite: a set holds the targets with scores of at most that.

    **Example**

    ~~~python
    threshold = conformal_threshold([label_scores(p, y) for p, y in validation], level=0.9)
    covered = [coverage(prediction_sets(p, threshold), y) for p, y in test]
    bootstrap(torch.tensor(covered))
    ~~~
    """
    if not 0 < level < 1:
        raise ArgumentError(f"level must lie between 0 and 1, got {level!r}.")
    tasks = [scores] if isinstance(scores, Tensor) and scores.dim() == 0 else list(scores)
    if not tasks or any(task.dim() == 0 or task.numel() == 0 for task in tasks):
        raise ArgumentError(
            "scores must be (tasks, queries) or one tensor per task, with one task and one query per task at least; "
            "scores of a single query per task are (tasks, 1)."
        )
    values, order = torch.cat([task.detach().reshape(-1) for task in tasks]).double().sort()
    if values.isnan().any():
        raise ArgumentError("scores must not be nan: the network has diverged. Lower its learning rates.")
    counts = torch.tensor([task.numel() for task in tasks], device=values.device)
    masses = (1 / (len(tasks) + 1) / counts.double()).repeat_interleave(counts)
    first = int((masses[order].cumsum(0) < level - 1e-9).sum())  # but for rounding, nine tasks reach a level of 0.9
    return values[first].item() if first < len(values) else math.inf


def label_scores(probabilities: Tensor, y: Tensor, u: Optional[Tensor] = None) -> Tensor:
    """
    **Description**

    Nonconformity of labels: 1 - p(y) or, with `u`, that of adaptive prediction sets (APS): the sum of all probabilities
    above p(y), plus u p(y). The first has the smallest sets on average if probabilities are right, the second larger
    ones for hard queries, with coverage that differs less between queries.

    **Arguments**

    * **probabilities** (Tensor) - (n, ways).
    * **y** (Tensor) - Labels, (n,).
    * **u** (Tensor, *optional*, default=None) - Uniform random numbers, (n,): `torch.rand(n)`. Give new ones to
      `prediction_sets`.

    **Returns** scores, (n,), in float64.

    **References**

    1. Sadinle, Lei and Wasserman. 2019. "Least Ambiguous Set-Valued Classifiers with Bounded Error Levels." JASA.
    2. Romano, Sesia and Candes. 2020. "Classification with Valid and Adaptive Coverage." NeurIPS.
    """
    check_probabilities(probabilities, y)
    return _scores(probabilities, u).gather(1, y.unsqueeze(1)).squeeze(1)


def prediction_sets(probabilities: Tensor, threshold: float, u: Optional[Tensor] = None) -> Tensor:
    """
    **Description**

    The labels whose `label_scores` are at most the threshold. A set can be empty.

    **Arguments**

    * **probabilities** (Tensor) - (n, ways).
    * **threshold** (float) - From `conformal_threshold`.
    * **u** (Tensor, *optional*, default=None) - Uniform random numbers, (n,), if `label_scores` had them.

    **Returns** which labels are in the set, bool, (n, ways).
    """
    check_predictive(probabilities)
    _check_threshold(threshold)
    return _scores(probabilities, u) <= threshold


def _scores(probabilities: Tensor, u: Optional[Tensor]) -> Tensor:
    """Of every label, (n, ways)."""
    probabilities = probabilities.detach().double()
    if u is None:
        return 1 - probabilities
    if u.shape != probabilities.shape[:1] or not ((u >= 0) & (u <= 1)).all():
        raise ArgumentError("u must be one number between 0 and 1 per example, (n,): give torch.rand(n).")
    p, order = probabilities.sort(stable=True, dim=-1, descending=True)
    return torch.empty_like(p).scatter(-1, order, p.cumsum(-1) - (1 - u.double().unsqueeze(-1)) * p)


def cdf_scores(cdf: Tensor) -> Tensor:
    """
    **Description**

    Nonconformity of targets in regression: |2 F(y) - 1|, which is 0 at the predictive's median and 1 at both ends.

    **Arguments**

    * **cdf** (Tensor) - The predictive's distribution function at each target, `prediction.cdf(y)`, of any shape.

    **Returns** scores of the same shape. A normal's are rounded to 1 beyond 5 standard deviations in float32, and 8 in
    float64; where many are, use standardised residuals.
    """
    if not ((cdf >= 0) & (cdf <= 1)).all():
        raise ArgumentError("cdf must lie between 0 and 1 everywhere: give prediction.cdf(y), not y itself.")
    return (2 * cdf - 1).abs()


def prediction_interval(
    cdf: Callable[[Tensor], Tensor], threshold: float, low: Tensor, high: Tensor
) -> Tuple[Tensor, Tensor]:
    """
    **Description**

    The targets whose `cdf_scores` are at most the threshold t: the predictive's central interval at the level t, from
    its (1 - t)/2-quantile to its (1 + t)/2-quantile.

    **Arguments**

    * **cdf** (callable) - Increasing, from targets to levels: `prediction.cdf`.
    * **threshold** (float) - From `conformal_threshold`.
    * **low, high** (Tensor) - Targets that all intervals lie between, as in `quantile`.

    **Returns** both ends, of the shape of `low` and `high`; infinite for a threshold of 1 or more.
    """
    _check_threshold(threshold)
    if (1 + threshold) / 2 >= 1:  # also where rounding makes it so
        return torch.full_like(low, -math.inf), torch.full_like(high, math.inf)
    return quantile(cdf, (1 - threshold) / 2, low, high), quantile(cdf, (1 + threshold) / 2, low, high)


def coverage(sets: Tensor, y: Tensor) -> float:
    """The fraction of labels, (n,), that are in their sets, bool, (n, ways); a float."""
    _check_sets(sets)
    check_labels(y, *sets.shape)
    return sets.gather(1, y.unsqueeze(1)).double().mean().item()


def mean_set_size(sets: Tensor) -> float:
    """The mean number of labels in sets, bool, (n, ways); a float."""
    _check_sets(sets)
    return sets.sum(-1).double().mean().item()


def interval_coverage(low: Tensor, high: Tensor, y: Tensor) -> float:
    """The fraction of targets that lie in their intervals, all of one shape; a float."""
    if not low.shape == high.shape == y.shape or not y.numel():
        raise ArgumentError(
            f"low, high and y must be of one shape, with one target at least; got {tuple(low.shape)}, "
            f"{tuple(high.shape)} and {tuple(y.shape)}."
        )
    if not (low <= high).all() or y.isnan().any():
        raise ArgumentError("low must not be above high, nor any of low, high and y nan: use prediction_interval.")
    return ((low <= y) & (y <= high)).double().mean().item()


def _check_sets(sets: Tensor) -> None:
    if sets.dim() != 2 or not len(sets) or sets.dtype != torch.bool:
        raise ArgumentError(
            f"sets must be bool, (n, ways), with one example at least; got {tuple(sets.shape)} of {sets.dtype}. Use "
            "prediction_sets."
        )


def _check_threshold(threshold: float) -> None:
    if not threshold >= 0:
        raise ArgumentError(
            f"threshold must be 0 or more, perhaps infinite: use conformal_threshold; got {threshold!r}."
        )
