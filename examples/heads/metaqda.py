#!/usr/bin/env python3

"""MetaQDA: one Gaussian per class with a learned prior, maximum a posteriori or fully Bayesian."""

import torch
from compare import arguments, compare
from tasks import noisy_causes

from l2l_niw import EpisodicModel
from l2l_niw.heads import MetaQDA
from l2l_niw.models import MLP


def main(ways=5, shots=5, width=16, inference="bayesian", lr=0.01, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    model = EpisodicModel(MLP(24, (64, width)), MetaQDA(width, inference))
    return compare(model, lambda: noisy_causes(ways, shots), lr, iterations=iterations, seed=seed, **options)


if __name__ == "__main__":
    arguments(main, __doc__)
