#!/usr/bin/env python3

"""Tasks of two kinds, sines and lines: ridge regression under a learned mixture of priors says which kind it sees."""

import torch
from compare import arguments, compare
from tasks import sines_and_lines

from l2l_niw import EpisodicModel
from l2l_niw.heads import RidgeMixture
from l2l_niw.models import MLP


def main(shots=10, width=40, lr=1e-3, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    model = EpisodicModel(MLP(1, (width, width), activate_last=True), RidgeMixture(width))
    return compare(model, lambda: sines_and_lines(shots), lr, iterations=iterations, seed=seed, **options)


if __name__ == "__main__":
    arguments(main, __doc__)
