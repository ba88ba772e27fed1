"""Whose weights are whose: shared layers, clones, clones of clones, and functional calls leave the model's alone."""

import warnings

import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.episodes import Episodes
from l2l_niw.errors import ArgumentError


class Shared(nn.Module):
    """One linear layer reached by three paths, and a weight tied by hand."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.sequence = nn.Sequential(self.first, nn.Tanh())
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.tied(self.sequence(self.again(x)))


def test_shared_parameters_stay_shared():
    niw, x = NIW(Shared(), lr=0.1), torch.randn(4, 6)
    learner = niw.clone()
    learner.adapt(learner(x).norm())
    assert learner.module.tied.weight is learner.module.first.weight
    assert learner.module.sequence[0].weight is learner.module.again.weight
    learner(x).norm().backward()
    assert len(learner.posterior().mean) == 3
    assert torch.isfinite(learner.posterior().predict(x, samples=2)).all()


class Twice(nn.Module):
    """One layer under two names, as in learn2learn's OmniglotCNN, and one weight in two layers."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
        self.features = nn.Sequential(self.base, nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
        self.features[2].weight = self.features[3].weight
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.features(x) + self.shift


@pytest.mark.parametrize("use", ["loop", "together", "nll", "episodes", "batched posterior"])
def test_layers_registered_twice_keep_their_own_weights(use):
    model = Twice()
    niw, x = NIW(model, lr=0.1), torch.randn(2, 5, 3)
    own = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    expected = model(x[0])

    def loss(network, x):
        return network(x).square().mean()

    post, episodes = niw.prior(), Episodes(niw, loss, steps=2)
    uses = {
        "loop": lambda: post.predict(x[0], samples=2, together=False),
        "together": lambda: post.predict(x[0], samples=2, together=True),
        "nll": lambda: niw.clone().posterior(lambda network: loss(network, x[0]), steps=1),
        "episodes": lambda: episodes((x,), (x,)).backward(),
        "batched posterior": lambda: episodes.posterior((x,)).predict(x, samples=2),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uses[use]()
    for name, t in model.state_dict(keep_vars=True).items():
        assert id(t) == own[name][0], name
        assert torch.equal(t, own[name][1]), name
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert torch.equal(post.network(weights)(x[0]), expected)
    doubled = {name: 2 * w for name, w in weights.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert torch.allclose(post.network(doubled)(x[0]), model(x[0]))


def test_weights_of_another_model_are_refused():
    post = NIW(nn.Linear(3, 2), lr=0.1).prior()
    with pytest.raises(ArgumentError, match="no parameter or buffer 'other'"):
        post.network({"other": torch.zeros(2)})(torch.randn(4, 3))


def test_a_tied_weight_goes_by_either_name():
    model = Twice()
    w, x = torch.randn(4, 4), torch.randn(5, 3)
    post = NIW(model, lr=0.1).prior()
    outputs = [post.network({name: w})(x) for name in ("features.2.weight", "features.3.weight")]
    assert torch.equal(*outputs)


def test_a_write_to_a_clone_s_weights_leaves_its_prior_alone():
    niw = NIW(nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 4)), lr=0.1)
    learner = niw.clone()
    with torch.no_grad():
        learner.module[0].weight.zero_()
    assert torch.equal(learner._prior.flat.m0[:200], niw.module[0].weight.flatten())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_cloned_learner_has_the_first_one_s_layout(frozen):
    niw = NIW(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)), lr=0.1, allow_nograd=True)
    learner, x = niw.clone(), torch.randn(4, 3)
    learner.adapt(learner(x).square().mean())
    niw.module[0].requires_grad_(not frozen)
    twin = learner.clone()
    for a, b in zip(twin.parameters(), learner.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change", ["assign", "double"])
def test_a_wrapper_follows_its_parameters_between_clones(change):
    niw, x = NIW(nn.Linear(3, 2), lr=0.1), torch.randn(4, 3)
    niw.clone()
    if change == "assign":
        niw.load_state_dict(
            {k: torch.ones_like(v) for k, v in niw.state_dict().items()} | {"full_wishart": niw.full_wishart},
            assign=True,
        )
    else:
        niw, x = niw.double(), x.double()
    learner = niw.clone()
    assert torch.equal(learner(x), niw.module(x))
    learner.adapt(learner(x).square().mean())
    learner(x + 1).square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in niw.parameters())


@pytest.mark.parametrize("trace", ["first", "full"])
def test_a_clone_made_in_inference_mode_adapts(trace):
    kl = {"kl_weight": 0.0} if trace == "full" else {}
    niw, x = NIW(nn.Linear(3, 2), lr=0.1, trace=trace, **kl), torch.randn(4, 3)
    with torch.inference_mode():
        learner = niw.clone()
    learner.adapt(learner(x).square().mean())
    learner(x + 1).square().mean().backward()
    assert niw.module.weight.grad.abs().max() > 0
