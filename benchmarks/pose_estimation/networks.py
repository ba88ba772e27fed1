"""The network of every row: the benchmark's convolutional encoder, and a head."""

import torch
from torch import nn

from l2l_niw import EpisodicModel
from l2l_niw.heads import ANP, CNP, BayesianRidge, FunctionalContrast, LeaveOneOut, Linear
from l2l_niw.models import PoseEncoder

FEATURES, WIDTH, DEPTH = 64, 64, 3
NOISE = 0.3  # at first, in units of what networks are given
HEADS = {
    "ridge": lambda targets: BayesianRidge(NOISE, prior_scale=NOISE),  # a regulariser of 1, the paper's
    "cnp-max": lambda targets: CNP(FEATURES, targets, WIDTH, DEPTH, aggregate="max"),
    "cnp-mean": lambda targets: CNP(FEATURES, targets, WIDTH, DEPTH, aggregate="mean"),
    "cnp-ba": lambda targets: CNP(FEATURES, targets, WIDTH, DEPTH, aggregate="bayesian"),
    "anp": lambda targets: ANP(FEATURES, targets, WIDTH, DEPTH, latent=False),
    "cnp-fcl": lambda targets: FunctionalContrast(CNP(FEATURES, targets, WIDTH, DEPTH, aggregate="max")),
    "anp-fcl": lambda targets: FunctionalContrast(ANP(FEATURES, targets, WIDTH, DEPTH, latent=False)),
    "linear": lambda targets: Linear(FEATURES, targets, "regression", NOISE, learn_noise=True),
}
SPEAKS = ("ridge", "linear")  # heads whose support has a likelihood that says something of the weights


def head_of(name, targets, inner=False):
    """A head. Where `inner`, steps are on the support, whose examples a neural process predicts from the others."""
    head = HEADS[name](targets)
    return LeaveOneOut(head) if inner and name not in SPEAKS else head


class Trunk(nn.Module):
    """
    **Description**

    The convolutions of an encoder or of several, for support and query of a batch of tasks at once: features
    (tasks, n, d) of images (tasks, n, channels, height, width), side by side where there are several encoders.

    **Arguments**

    * **encoders** (sequence) - Instances of `PoseEncoder`, whose last layers are taken off: `tops` has them.
    """

    def __init__(self, encoders):
        super().__init__()
        self.tops = [encoder.out for encoder in encoders]
        for encoder in encoders:
            encoder.out = nn.Identity()
        self.encoders = nn.ModuleList(encoders).to(memory_format=torch.channels_last)

    def forward(self, x):
        flat = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        return torch.cat([encoder(flat) for encoder in self.encoders], -1).unflatten(0, x.shape[:2])

    def pair(self, x, x_query):
        """Features of support and query."""
        return self(torch.cat([x, x_query], 1)).split([x.shape[1], x_query.shape[1]], 1)


class Part(nn.Module):
    """One encoder's share of a trunk's features."""

    def __init__(self, start, width):
        super().__init__()
        self.start, self.width = start, width

    def forward(self, x):
        return x[..., self.start : self.start + self.width]


def networks(column, head, count=1, inner=False):
    """A trunk, and `count` models of its features: an encoder's last layer and a head."""
    trunk = Trunk([PoseEncoder(FEATURES, column.channels, column.size) for _ in range(count)])
    width, models = trunk.tops[0].in_features, []
    for k, top in enumerate(trunk.tops):
        backbone = nn.Sequential(Part(k * width, width), top)
        models.append(EpisodicModel(backbone, head_of(head, column.space.width, inner)))
    return trunk, models


def whole_network(column, head):
    """The same as one model, from images to poses."""
    encoder = PoseEncoder(FEATURES, column.channels, column.size)
    return EpisodicModel(encoder, head_of(head, column.space.width, inner=True))
