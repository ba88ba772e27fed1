"""Task families and their sources."""

from l2l_niw.data.sine_line import BayesOptimal, SineLine, Tasks

__all__ = ["BayesOptimal", "SineLine", "Tasks"]
