"""Does a query belong to one of the support's classes? Scores of out-of-distribution queries, and how good they are."""

from typing import Optional

import torch
from torch import Tensor
from torch.special import entr

from l2l_niw.errors import ArgumentError, require
from l2l_niw.metrics.calibration import check_predictive


def max_probability(probabilities: Tensor) -> Tensor:
    """
    **Description**

    1 - max p, the common baseline.

    **Arguments**

    * **probabilities** (Tensor) - (n, ways).

    **Returns** scores, (n,).

    **References**

    1. Hendrycks and Gimpel. 2017. "A Baseline for Detecting Misclassified and Out-of-Distribution Examples." ICLR.
    """
    check_predictive(probabilities)
    return 1 - probabilities.max(-1).values


def entropy(probabilities: Tensor) -> Tensor:
    """
    **Description**

    The predictive's entropy, -sum p log p in nats: high where classes overlap (aleatoric), and where posterior samples
    disagree (epistemic); `mutual_information` is the second part alone.

    **Arguments**

    * **probabilities** (Tensor) - Averaged over posterior samples, (n, ways).

    **Returns** scores, (n,).
    """
    check_predictive(probabilities)
    return entr(probabilities).sum(-1)


def mutual_information(probabilities: Tensor, weights: Optional[Tensor] = None) -> Tensor:
    """
    **Description**

    The mutual information of label and weights, H[E p] - E H[p]: the entropy of the averaged predictive less the mean
    entropy of each sample's own, so that noise that all samples agree on does not count.

    **Arguments**

    * **probabilities** (Tensor) - Of each posterior sample, (samples, n, ways).
    * **weights** (Tensor, *optional*, default=None) - Of posterior samples, or of a mixture's components, (samples,) or
      (samples, n), with a sum of 1 over samples. Equal if not given.

    **Returns** scores, (n,), in float64.

    **References**

    1. Houlsby et al. 2011. "Bayesian Active Learning for Classification and Preference Learning." arXiv.
    """
    if probabilities.dim() != 3:
        raise ArgumentError(f"probabilities must be (samples, n, ways); got {tuple(probabilities.shape)}.")
    check_predictive(probabilities.flatten(0, 1))
    probabilities = probabilities.double()
    if weights is None:
        weights = torch.full_like(probabilities[:, 0, 0], 1 / len(probabilities))
    if weights.shape not in (probabilities.shape[:1], probabilities.shape[:2]):
        raise ArgumentError(
            f"weights must be (samples,) or (samples, n); got {tuple(weights.shape)}, and probabilities "
            f"{tuple(probabilities.shape)}."
        )
    sums = weights.sum(0)
    if not ((weights >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        raise ArgumentError("weights must not be negative and must sum to 1 over samples: give log_weights.softmax(0).")
    weights = weights.double().reshape(len(weights), -1)
    mean = (weights.unsqueeze(-1) * probabilities).sum(0)
    noise = (weights * entr(probabilities).sum(-1)).sum(0)
    return (entr(mean).sum(-1) - noise).clamp_min(0.0)  # but for rounding


def auroc(scores: Tensor, is_open: Tensor) -> float:
    """
    **Description**

    The probability that an out-of-distribution query has a higher score than one of the support's classes, where ties
    count one half: the area under the ROC curve. Which of the two is called positive makes no difference to it.

    **Arguments**

    * **scores** (Tensor) - Higher for what seems out-of-distribution, (n,).
    * **is_open** (Tensor) - Whether it is, bool, (n,).

    **Returns** a float: 1 for a perfect score, 0.5 for an uninformative one.

    **Example**

    ~~~python
    auroc(mutual_information(probabilities), is_open)
    ~~~
    """
    metric = require("torchmetrics.functional.classification", "vision").binary_auroc
    return metric(_ranks(scores, is_open), is_open.long()).item()


def fpr_at_95(scores: Tensor, is_open: Tensor) -> float:
    """
    **Description**

    The false positive rate at a true positive rate of 95%, with the convention of ODIN: positives are in-distribution
    queries, and a query is accepted as one where its score is at most a threshold. At the lowest threshold that accepts
    95% of in-distribution queries or more, this is the fraction of out-of-distribution queries that are accepted too.

    **Arguments**

    * **scores, is_open** - As in `auroc`.

    **Returns** a float: 0 for a perfect score, about 0.95 for an uninformative one.

    **References**

    1. Liang, Li and Srikant. 2018. "Enhancing the Reliability of Out-of-distribution Image Detection in Neural
       Networks." ICLR.
    """
    metric = require("torchmetrics.functional.classification", "vision").binary_roc
    fpr, tpr, _ = metric(1 - _ranks(scores, is_open), (~is_open).long())
    return fpr[tpr >= 0.95].min().item()


def _ranks(scores: Tensor, is_open: Tensor) -> Tensor:
    """
    Scores by their ranks, between 0 and 1, with ties as they are: torchmetrics would take scores above 1 for logits,
    and its sigmoid would tie the largest.
    """
    if scores.dim() != 1 or is_open.shape != scores.shape or is_open.dtype != torch.bool:
        raise ArgumentError(
            f"scores and is_open must be (n,) both, and is_open bool; got {tuple(scores.shape)} and "
            f"{tuple(is_open.shape)} of {is_open.dtype}. Flatten the episodes first."
        )
    if scores.isnan().any():
        raise ArgumentError("scores must not be nan: the network has diverged. Lower its learning rates.")
    if is_open.all() or not is_open.any():
        raise ArgumentError("is_open must have both: give queries of the support's classes and queries of others.")
    values, ranks = scores.unique(return_inverse=True)
    return ranks.double() / len(values)
