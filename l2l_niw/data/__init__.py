"""Task families and their sources."""

from l2l_niw.data.images import Images, load_images
from l2l_niw.data.shift import CorruptedQueries, OpenSetQueries, contrast, gaussian_blur, gaussian_noise
from l2l_niw.data.sine_line import BayesOptimal, SineLine, Tasks
from l2l_niw.data.sources import SineLineTaskset, sine_line_tasksets, torchmeta_sine_line
from l2l_niw.data.tasksets import ClassTaskset, ImageTaskset, Tasksets, get_tasksets

__all__ = [
    "BayesOptimal",
    "ClassTaskset",
    "CorruptedQueries",
    "ImageTaskset",
    "Images",
    "OpenSetQueries",
    "SineLine",
    "SineLineTaskset",
    "Tasks",
    "Tasksets",
    "contrast",
    "gaussian_blur",
    "gaussian_noise",
    "get_tasksets",
    "load_images",
    "sine_line_tasksets",
    "torchmeta_sine_line",
]
