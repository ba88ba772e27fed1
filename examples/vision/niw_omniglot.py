#!/usr/bin/env python3

"""NIW on Omniglot, in learn2learn's MAML loop: accuracy and calibration on characters never seen in training."""

import torch
from niw_loop import arguments
from niw_loop import main as loop

from l2l_niw.models import batch_statistics

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


def main(method="niw", ways=5, shots=1, fast_lr=0.4, num_iterations=1500, data=None, seed=0, filters=32, **options):
    torch.manual_seed(seed)
    model = batch_statistics(l2l.vision.models.OmniglotCNN(ways, hidden_size=filters))
    options.update(method=method, ways=ways, shots=shots, fast_lr=fast_lr, num_iterations=num_iterations)
    return loop("omniglot", model, data=data, seed=seed, **options)


if __name__ == "__main__":
    main(**vars(arguments(main, __doc__)))
