"""Task families and their sources."""

from l2l_niw.data.sine_line import BayesOptimal, SineLine, Tasks
from l2l_niw.data.sources import SineLineTaskset, sine_line_tasksets, torchmeta_sine_line

__all__ = ["BayesOptimal", "SineLine", "SineLineTaskset", "Tasks", "sine_line_tasksets", "torchmeta_sine_line"]
