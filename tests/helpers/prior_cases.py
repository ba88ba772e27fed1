"""What the tests of `l2l_niw.inference` share: L_0 made of given tensors."""

import math

import torch

from l2l_niw.inference import prior as priors
from l2l_niw.inference.wishart import to_raw


def make_prior(m0, log_variance, n0=None, initial=0.0, wishart="factorised"):
    """L_0 with one weight per pair of tensors; n_0 is 2.5 above the lower end of its domain."""
    d = sum(m.numel() for m in m0)
    n0 = n0 or (d + 1.5 if wishart == "full" else 2.5)
    raw = torch.tensor(to_raw(n0, wishart, d), dtype=m0[0].dtype)
    return priors.init([f"w{i}" for i in range(len(m0))], m0, log_variance, raw, initial, wishart)


def leaves_of(prior):
    """Parameters of these values: m_0, log(V_0 / n_0) and the scalar behind n_0."""
    return [t.detach().clone().requires_grad_() for t in (*prior.m0, *prior.log_variance, prior.raw_n0)]


def with_leaves(prior, leaves):
    """L_0 of these parameters."""
    count = len(prior.m0)
    initial = -math.log(prior.start)
    return priors.init(prior.names, leaves[:count], leaves[count:-1], leaves[-1], initial, prior.wishart)
