"""Task families and their sources."""

from l2l_niw.data.images import Images, load_images
from l2l_niw.data.sine_line import BayesOptimal, SineLine, Tasks
from l2l_niw.data.sources import SineLineTaskset, sine_line_tasksets, torchmeta_sine_line
from l2l_niw.data.tasksets import ImageTaskset, Tasksets, get_tasksets

__all__ = [
    "BayesOptimal",
    "ImageTaskset",
    "Images",
    "SineLine",
    "SineLineTaskset",
    "Tasks",
    "Tasksets",
    "get_tasksets",
    "load_images",
    "sine_line_tasksets",
    "torchmeta_sine_line",
]
