"""How good predictions are, what their uncertainty is used for, and how sure one can be of a difference."""

from l2l_niw.metrics.bootstrap import Interval, bootstrap
from l2l_niw.metrics.open_set import auroc, entropy, fpr_at_95, max_probability, mutual_information
from l2l_niw.metrics.regression import quantile, r_ece, reliability

__all__ = [
    "Interval",
    "auroc",
    "bootstrap",
    "entropy",
    "fpr_at_95",
    "max_probability",
    "mutual_information",
    "quantile",
    "r_ece",
    "reliability",
]
