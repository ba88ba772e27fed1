"""What the tests of `l2l_niw.inference` share: L_0 made of given tensors."""

import torch

from l2l_niw.inference.prior import Prior
from l2l_niw.inference.wishart import to_raw


def make_prior(m0, log_variance, n0=None, initial=0.0, wishart="factorised"):
    """L_0 with one weight per pair of tensors; n_0 is 2.5 above the lower end of its domain."""
    d = sum(m.numel() for m in m0)
    n0 = n0 or (d + 1.5 if wishart == "full" else 2.5)
    raw = torch.tensor(to_raw(n0, wishart, d), dtype=m0[0].dtype)
    return Prior([f"w{i}" for i in range(len(m0))], list(m0), list(log_variance), raw, initial, wishart)


def leaves_of(prior):
    return [*prior.m0, *prior.log_variance, prior.raw_n0]


def with_leaves(prior, leaves):
    count = len(prior.m0)
    return prior._replace(m0=list(leaves[:count]), log_variance=list(leaves[count:-1]), raw_n0=leaves[-1])
