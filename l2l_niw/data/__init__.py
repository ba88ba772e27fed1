"""Task families and their sources."""

from l2l_niw.data.images import Images, load_images
from l2l_niw.data.shift import CorruptedQueries, OpenSetQueries, contrast, gaussian_blur, gaussian_noise
from l2l_niw.data.sine_line import BayesOptimal, SineLine, Tasks
from l2l_niw.data.sources import SineLineTaskset, sine_line_tasksets, torchmeta_sine_line
from l2l_niw.data.tasksets import ClassTaskset, ImageTaskset, MappedTaskset, Tasksets, get_tasksets
from l2l_niw.data.text import Texts, TextTasksets, clinc150, get_text_tasksets, read_csv

__all__ = [
    "BayesOptimal",
    "ClassTaskset",
    "CorruptedQueries",
    "ImageTaskset",
    "Images",
    "MappedTaskset",
    "OpenSetQueries",
    "SineLine",
    "SineLineTaskset",
    "Tasks",
    "Tasksets",
    "TextTasksets",
    "Texts",
    "clinc150",
    "contrast",
    "gaussian_blur",
    "gaussian_noise",
    "get_tasksets",
    "get_text_tasksets",
    "load_images",
    "read_csv",
    "sine_line_tasksets",
    "torchmeta_sine_line",
]
