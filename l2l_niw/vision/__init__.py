"""Few-shot classification of images and texts: methods side by side, in one loop and with one backbone."""

from l2l_niw.vision.config import Config
from l2l_niw.vision.methods import METHODS, build
from l2l_niw.vision.runs import evaluate, train

__all__ = ["METHODS", "Config", "build", "evaluate", "train"]
