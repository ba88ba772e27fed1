#!/usr/bin/env python3

"""ProtoNet's nearest-centroid head: plain training is ProtoNet, and NIW adapts the metric to each task."""

import torch
from compare import arguments, compare
from tasks import noisy_causes

from l2l_niw import EpisodicModel
from l2l_niw.heads import NearestCentroid
from l2l_niw.models import MLP


def main(ways=5, shots=5, width=64, distance="euclidean", lr=0.05, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    scale = 0.1 if distance == "euclidean" else 10.0
    model = EpisodicModel(MLP(24, (width, width)), NearestCentroid(distance, scale, learn_scale=True))
    return compare(model, lambda: noisy_causes(ways, shots), lr, iterations=iterations, seed=seed, **options)


if __name__ == "__main__":
    arguments(main, __doc__)
