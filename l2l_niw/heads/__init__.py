"""Heads: p(y | x, S, theta), from a linear layer to neural processes."""

from l2l_niw.heads.base import Head
from l2l_niw.heads.feat import FEAT
from l2l_niw.heads.functional_contrast import FunctionalContrast
from l2l_niw.heads.leave_one_out import LeaveOneOut
from l2l_niw.heads.linear import Linear
from l2l_niw.heads.metaqda import MetaQDA
from l2l_niw.heads.nearest_centroid import NearestCentroid
from l2l_niw.heads.neural_process import ANP, CNP
from l2l_niw.heads.ridge import BayesianRidge, Ridge
from l2l_niw.heads.ridge_mixture import RidgeMixture

__all__ = [
    "ANP",
    "CNP",
    "FEAT",
    "BayesianRidge",
    "FunctionalContrast",
    "Head",
    "LeaveOneOut",
    "Linear",
    "MetaQDA",
    "NearestCentroid",
    "Ridge",
    "RidgeMixture",
]
