"""NIW-Meta, a hierarchical Bayesian few-shot learner, with learn2learn's API."""

from l2l_niw.utils._learn2learn import import_learn2learn
from l2l_niw.utils._torchvision import ensure_torchvision

ensure_torchvision()
import_learn2learn()

from l2l_niw.algorithms import NIW, BatchedEpisodes  # noqa: E402
from l2l_niw.heads.episodic import EpisodicModel  # noqa: E402

__version__ = "0.2.0"
__all__ = ["NIW", "BatchedEpisodes", "EpisodicModel"]
