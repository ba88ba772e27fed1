#!/usr/bin/env python3

"""Inner steps on what is left out: RidgeNet on sines and lines, where each support point is predicted by the others."""

import torch
from compare import arguments, compare
from tasks import sines_and_lines

from l2l_niw import EpisodicModel
from l2l_niw.heads import LeaveOneOut, Ridge
from l2l_niw.models import MLP


def main(shots=10, width=40, lr=3e-4, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    head = LeaveOneOut(Ridge("regression", lam=0.1, learn_lam=True, noise=1.0, learn_noise=True))
    model = EpisodicModel(MLP(1, (width, width), activate_last=True), head)
    return compare(model, lambda: sines_and_lines(shots), lr, iterations=iterations, seed=seed, **options)


if __name__ == "__main__":
    arguments(main, __doc__)
