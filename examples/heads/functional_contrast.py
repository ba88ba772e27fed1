#!/usr/bin/env python3

"""
Functional contrastive learning on sines and lines: a CNP as it is, and with a penalty that tells the tasks of a batch
apart. Of one task alone there is nothing to contrast, so that both are trained plainly, on batches.
"""

import torch
from compare import arguments, compare
from tasks import sines_and_lines
from torch import nn

from l2l_niw import EpisodicModel
from l2l_niw.heads import CNP, FunctionalContrast


def main(shots=10, width=64, weight=0.1, tasks=8, iterations=1000, seed=0, **options):
    def batch():
        return [torch.stack(parts) for parts in zip(*(sines_and_lines(shots) for _ in range(tasks)))]

    for title, head_of in (("CNP", lambda cnp: cnp), ("with contrast", lambda cnp: FunctionalContrast(cnp, weight))):
        torch.manual_seed(seed)
        model = EpisodicModel(nn.Identity(), head_of(CNP(1, width=width)))
        print(title)
        results = compare(model, batch, lr=None, methods=("plain",), iterations=iterations, seed=seed, **options)
    return results


if __name__ == "__main__":
    arguments(main, __doc__)
