"""How good predictions are, what their uncertainty is used for, and how sure one can be of a difference."""

from l2l_niw.metrics.bootstrap import Interval, bootstrap
from l2l_niw.metrics.conformal import (
    cdf_scores,
    conformal_threshold,
    coverage,
    interval_coverage,
    label_scores,
    mean_set_size,
    prediction_interval,
    prediction_sets,
)
from l2l_niw.metrics.directional import density_rank, projected_normal
from l2l_niw.metrics.open_set import auroc, entropy, fpr_at_95, max_probability, mutual_information
from l2l_niw.metrics.pose import angular_error, pixel_distance, quaternion_distance, rotation_error
from l2l_niw.metrics.regression import quantile, r_ece, reliability
from l2l_niw.metrics.selective import RiskCoverage, aurc, excess_aurc, plot_risk_coverage, risk_coverage

__all__ = [
    "Interval",
    "RiskCoverage",
    "angular_error",
    "aurc",
    "auroc",
    "bootstrap",
    "cdf_scores",
    "conformal_threshold",
    "coverage",
    "density_rank",
    "entropy",
    "excess_aurc",
    "fpr_at_95",
    "interval_coverage",
    "label_scores",
    "max_probability",
    "mean_set_size",
    "mutual_information",
    "pixel_distance",
    "plot_risk_coverage",
    "prediction_interval",
    "prediction_sets",
    "projected_normal",
    "quantile",
    "quaternion_distance",
    "r_ece",
    "reliability",
    "risk_coverage",
    "rotation_error",
]
