from l2l_niw.algorithms.batched import BatchedEpisodes
from l2l_niw.algorithms.learner import NIWLearner
from l2l_niw.algorithms.mixture import NIWMixture
from l2l_niw.algorithms.niw import NIW

__all__ = ["NIW", "BatchedEpisodes", "NIWLearner", "NIWMixture"]
