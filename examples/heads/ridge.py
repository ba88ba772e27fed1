#!/usr/bin/env python3

"""Ridge regression in closed form: RidgeNet on sines and lines, and R2D2's one-hot use for classification."""

import torch
from compare import arguments, compare
from tasks import noisy_causes, sines_and_lines

from l2l_niw import EpisodicModel
from l2l_niw.heads import Ridge
from l2l_niw.models import MLP


def main(task="regression", shots=10, width=40, lr=3e-4, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    if task == "regression":
        head = Ridge(task, lam=0.1, learn_lam=True, noise=1.0, learn_noise=True)
        model, sample = EpisodicModel(MLP(1, (width, width), activate_last=True), head), lambda: sines_and_lines(shots)
    else:
        head = Ridge(task, lam=1.0, learn_lam=True, scale=5.0)
        model, sample = EpisodicModel(MLP(24, (width, width)), head), lambda: noisy_causes(shots=shots)
    return compare(model, sample, lr, iterations=iterations, seed=seed, **options)


if __name__ == "__main__":
    arguments(main, __doc__)
