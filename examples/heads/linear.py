#!/usr/bin/env python3

"""A linear layer, MAML's own: it knows a task only by what it has adapted to."""

import torch
from compare import arguments, compare
from tasks import noisy_causes

from l2l_niw import EpisodicModel
from l2l_niw.heads import Linear
from l2l_niw.models import MLP


def main(ways=5, shots=5, width=64, lr=0.3, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    model = EpisodicModel(MLP(24, (width, width), activate_last=True), Linear(width, ways))
    # without adaptation a linear layer can only guess, so the plain column is left out
    return compare(
        model, lambda: noisy_causes(ways, shots), lr, ("MAML", "NIW"), iterations=iterations, seed=seed, **options
    )


if __name__ == "__main__":
    arguments(main, __doc__)
