"""Models, losses and data for posteriors with their full covariance."""

import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn import functional as F

from l2l_niw import NIW


class Head(nn.Module):
    """A network that returns a distribution of means and standard deviations, or of logits."""

    def __init__(self, kind):
        super().__init__()
        self.body, self.last, self.kind = nn.Linear(2, 4), nn.Linear(4, 4), kind

    def forward(self, x):
        f = self.last(torch.tanh(self.body(x)))
        if self.kind == "categorical":
            return Categorical(logits=f, validate_args=False)
        p = Normal(f[..., :2], F.softplus(f[..., 2:]) + 0.3, validate_args=False)
        return Independent(p, 1, validate_args=False) if self.kind == "independent" else p


def network(outputs=1):
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs))


def data(kind, n):
    x = torch.randn(n, 2)
    if kind in ("gaussian", "linear"):
        return x, x.sum(-1, keepdim=True).sin()
    if kind in ("normal", "independent"):
        return x, x.sin()
    if kind == "bernoulli":
        return x, (x[:, :1] > 0).double()
    return x, (x.abs().sum(-1) * 1.3).long().clamp(max=2)


def mse(net, x, y):
    return F.mse_loss(net(x), y)


def cross_entropy(net, x, y):
    return F.cross_entropy(net(x), y)


def binary(net, x, y):
    return F.binary_cross_entropy_with_logits(net(x), y)


def nll(net, x, y):
    return -net(x).log_prob(y).sum() / len(x)


KINDS = {
    "linear": (lambda: nn.Linear(2, 1), mse),
    "gaussian": (network, mse),
    "categorical": (lambda: network(3), cross_entropy),
    "bernoulli": (network, binary),
    "normal": (lambda: Head("normal"), nll),
    "independent": (lambda: Head("independent"), nll),
    "distribution of classes": (lambda: Head("categorical"), nll),
}
SHAPES = {
    "full": {"curvature": "full"},
    "rank 2": {"rank": 2, "prior_std": 1.0},
    "by layer": {"rank": 2, "directions": "by_layer", "prior_std": 1.0},
    "adapters": {"rank": 2, "directions": "adapters", "prior_std": 1.0},
}


def make(kind="gaussian", shape="rank 2", **options):
    build, loss = KINDS[kind]
    given = {"noise": 0.6, "n0": 3.0, "linearise": "all", **SHAPES[shape], **options}
    return NIW(build(), lr=0.1, **given), loss


class Spare(nn.Module):
    """A model with a layer that its outputs do not depend on."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)
