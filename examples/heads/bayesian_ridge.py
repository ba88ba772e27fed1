#!/usr/bin/env python3

"""Bayesian ridge on sines and lines: inner steps climb the support's evidence, and predictions know their variance."""

import torch
from compare import arguments, compare
from tasks import sines_and_lines

from l2l_niw import EpisodicModel
from l2l_niw.heads import BayesianRidge
from l2l_niw.models import MLP


def main(shots=10, width=40, lr=1e-3, iterations=1000, seed=0, **options):
    torch.manual_seed(seed)
    model = EpisodicModel(MLP(1, (width, width), activate_last=True), BayesianRidge(noise=0.5))
    return compare(model, lambda: sines_and_lines(shots), lr, iterations=iterations, seed=seed, **options)


if __name__ == "__main__":
    arguments(main, __doc__)
