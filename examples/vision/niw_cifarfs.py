#!/usr/bin/env python3

"""NIW on CIFAR-FS, in learn2learn's MAML loop: accuracy and calibration on classes never seen in training."""

import torch
from niw_loop import arguments
from niw_loop import main as loop
from torch import nn

from l2l_niw.models import batch_statistics

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def main(method="niw", ways=5, shots=1, fast_lr=0.1, num_iterations=1500, data=None, seed=0, filters=32, **options):
    torch.manual_seed(seed)
    body = l2l.vision.models.ConvBase(hidden=filters, channels=3, max_pool=True)
    model = batch_statistics(nn.Sequential(body, nn.Flatten(), nn.Linear(4 * filters, ways)))
    options.update(method=method, ways=ways, shots=shots, fast_lr=fast_lr, num_iterations=num_iterations)
    return loop("cifarfs", model, data=data, seed=seed, **options)


if __name__ == "__main__":
    main(**vars(arguments(main, __doc__)))
