#!/usr/bin/env python3

"""FEAT: a transformer over the prototypes, trained with its contrastive term."""

import torch
from compare import arguments, compare
from tasks import noisy_causes

from l2l_niw import EpisodicModel
from l2l_niw.heads import FEAT
from l2l_niw.models import MLP


def main(ways=5, shots=5, width=64, lr=0.03, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    model = EpisodicModel(MLP(24, (width, width)), FEAT(width, contrast=0.1))
    return compare(model, lambda: noisy_causes(ways, shots), lr, iterations=iterations, seed=seed, **options)


if __name__ == "__main__":
    arguments(main, __doc__)
