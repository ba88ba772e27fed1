#!/usr/bin/env python3

"""Conditional neural processes on sines and lines, with mean, maximum or Bayesian aggregation."""

import torch
from compare import arguments, compare
from tasks import sines_and_lines
from torch import nn

from l2l_niw import EpisodicModel
from l2l_niw.heads import CNP


def main(shots=10, width=64, aggregate="bayesian", latent=False, lr=1e-4, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    model = EpisodicModel(nn.Identity(), CNP(1, width=width, aggregate=aggregate, latent=latent))
    return compare(model, lambda: sines_and_lines(shots), lr, iterations=iterations, seed=seed, **options)


if __name__ == "__main__":
    arguments(main, __doc__)
