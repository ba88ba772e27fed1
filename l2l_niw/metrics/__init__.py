"""How good predictions are, and how sure one can be of a difference."""

from l2l_niw.metrics.bootstrap import Interval, bootstrap
from l2l_niw.metrics.regression import quantile, r_ece, reliability

__all__ = ["Interval", "bootstrap", "quantile", "r_ece", "reliability"]
