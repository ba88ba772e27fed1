"""What the tests of heads share: every head, an episode for it, and the one loop of all of them."""

import learn2learn as l2l
import pytest
import torch
from torch import nn

from l2l_niw import NIW, EpisodicModel
from l2l_niw.heads import (
    ANP,
    CNP,
    FEAT,
    BayesianRidge,
    FunctionalContrast,
    Linear,
    MetaQDA,
    NearestCentroid,
    Ridge,
    RidgeMixture,
)
from l2l_niw.models import MLP

INPUTS, FEATURES = 5, 8
HEADS = {
    "linear": lambda: Linear(FEATURES, 3),
    "ncc": lambda: NearestCentroid(),
    "ncc-cosine": lambda: NearestCentroid("cosine", scale=10.0, learn_scale=True),
    "ridge": lambda: Ridge(learn_lam=True),
    "feat": lambda: FEAT(FEATURES),
    "feat-two-heads": lambda: FEAT(FEATURES, heads=2, scale=0.5, contrast=1.0),
    "metaqda-map": lambda: MetaQDA(FEATURES, "map"),
    "metaqda-bayesian": lambda: MetaQDA(FEATURES, "bayesian"),
    "linear-regression": lambda: Linear(FEATURES, 2, "regression", learn_noise=True),
    "ridge-regression": lambda: Ridge("regression", learn_lam=True, learn_noise=True),
    "bayesian-ridge": lambda: BayesianRidge(),
    "ridge-mixture": lambda: RidgeMixture(FEATURES, 3, targets=2),
    "cnp-mean": lambda: CNP(FEATURES, 2, width=8),
    "cnp-max": lambda: CNP(FEATURES, 2, width=8, aggregate="max"),
    "cnp-bayesian": lambda: CNP(FEATURES, 2, width=8, aggregate="bayesian"),
    "cnp-latent": lambda: CNP(FEATURES, 2, width=8, latent=True),
    "cnp-latent-max": lambda: CNP(FEATURES, 2, width=8, aggregate="max", latent=True, samples=2),
    "cnp-latent-bayesian": lambda: CNP(FEATURES, 2, width=8, aggregate="bayesian", latent=True, deterministic=False),
    "anp": lambda: ANP(FEATURES, 2, width=8, heads=2),
    "anp-deep": lambda: ANP(FEATURES, 2, width=8, heads=4, self_layers=1, cross_layers=1, latent=False),
    "cnp-contrast": lambda: FunctionalContrast(CNP(FEATURES, 2, width=8, aggregate="max")),
    "anp-contrast": lambda: FunctionalContrast(ANP(FEATURES, 2, width=8, heads=2, latent=False), weight=0.5),
}
CLASSIFIERS = [name for name in HEADS if HEADS[name]().task == "classification"]
METHODS = ["plain", "maml", "niw", "niw-ggn"]
every_head = pytest.mark.parametrize("head", HEADS)
every_classifier = pytest.mark.parametrize("head", CLASSIFIERS)
every_method = pytest.mark.parametrize("method", METHODS)


def build(head):
    model = EpisodicModel(MLP(INPUTS, (12, FEATURES), nn.Tanh), HEADS[head]())
    with torch.no_grad():
        for p in model.head.parameters():  # away from zeros, where gradients might hide
            p.add_(0.1 * torch.randn_like(p))
    return model


def targets(head, n, *lead, ways=3):
    if head in CLASSIFIERS:
        return (torch.arange(n) % ways).expand(*lead, n).contiguous()
    return torch.randn(*lead, n, 2)


def episode(head, *lead, n=7, m=6, ways=3):
    x, x_query = torch.randn(*lead, n, INPUTS), torch.randn(*lead, m, INPUTS)
    return x, targets(head, n, *lead, ways=ways), x_query, targets(head, m, *lead, ways=ways)


def seeded_call(model, *args, **kwargs):
    torch.manual_seed(1)  # latents
    return model(*args, **kwargs)


def density(prediction):
    """What a prediction is, as one tensor, with a row per example."""
    if hasattr(prediction, "logits"):
        return prediction.logits
    return torch.cat([prediction.mean, prediction.variance], -1)


def wrap(method, model):
    if method == "maml":
        return l2l.algorithms.MAML(model, lr=0.01)
    options = {"curvature": "ggn"} if method == "niw-ggn" else {}
    return NIW(model, lr=0.01, average_iterates=True, burn_in=1, **options)


def run_episode(method, model, data, steps=3):
    """The one loop of all heads; returns the query's prediction and what is trained."""
    x, y, x_query, y_query = data
    if method == "plain":
        prediction = model(x, y, x_query, y_query)
        prediction.loss(y_query).backward()
        return prediction, model
    wrapper = wrap(method, model)
    learner = wrapper.clone()
    for _ in range(steps):
        learner.adapt(learner(x, y).nll(y))
    prediction = learner(x, y, x_query, y_query)
    prediction.loss(y_query).backward()
    return prediction, wrapper
