#!/usr/bin/env python3

"""Attentive neural processes on sines and lines, with a deterministic and a latent path."""

import torch
from compare import arguments, compare
from tasks import sines_and_lines
from torch import nn

from l2l_niw import EpisodicModel
from l2l_niw.heads import ANP


def main(shots=10, width=64, heads=4, self_layers=1, latent=True, lr=1e-4, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    head = ANP(1, width=width, heads=heads, self_layers=self_layers, latent=latent)
    model = EpisodicModel(nn.Identity(), head)
    return compare(model, lambda: sines_and_lines(shots), lr, iterations=iterations, seed=seed, **options)


if __name__ == "__main__":
    arguments(main, __doc__)
