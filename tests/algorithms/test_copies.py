"""Whose weights are whose: shared layers, clones, clones of clones, and functional calls leave the model's alone."""

import warnings

import pytest
import torch
from torch import nn

from l2l_niw import NIW, BatchedEpisodes
from l2l_niw.errors import ArgumentError, LossError


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


@pytest.mark.parametrize("use", ["loop", "vectorized", "nll", "batch", "batched posterior"])
def test_layers_registered_twice_keep_their_own_weights(use):
    model = Twice()
    niw, x = NIW(model, lr=0.1, second_order="none"), torch.randn(2, 5, 3)
    own = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    expected = model(x[0])

    def loss(network, x):
        return network(x).square().mean()

    post, episodes = niw.prior(), BatchedEpisodes(niw, loss, steps=2)
    uses = {
        "loop": lambda: post.predict(x[0], samples=2, vectorize=False),
        "vectorized": lambda: post.predict(x[0], samples=2, vectorize=True),
        "nll": lambda: niw.clone().posterior(lambda network: loss(network, x[0]), steps=1),
        "batch": lambda: episodes((x,), (x,)).backward(),
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


def test_a_write_to_a_clone_s_weights_leaves_the_model_alone():
    niw, x = NIW(nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 4)), lr=0.1), torch.randn(3, 10)
    before = [p.detach().clone() for p in niw.module.parameters()]
    learner = niw.clone()
    with torch.no_grad():
        learner.module[0].weight.zero_()
    learner.adapt(learner(x).square().mean())
    assert all(torch.equal(p, b) for p, b in zip(niw.module.parameters(), before))
    assert all(torch.equal(m, b) for m, b in zip(niw.prior().mean.values(), before))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_cloned_learner_has_the_first_one_s_weights(frozen):
    niw = NIW(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)), lr=0.1, allow_nograd=True)
    learner, x = niw.clone(), torch.randn(4, 3)
    learner.adapt(learner(x).square().mean())
    niw.module[0].requires_grad_(not frozen)
    twin = learner.clone()
    for a, b in zip(twin.parameters(), learner.parameters()):
        assert torch.equal(a, b)
    twin.adapt(twin(x).square().mean())


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, spare=False):
        return (self.spare if spare else self.used)(x)


@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
@pytest.mark.parametrize("spare_too", [False, True])
def test_a_cloned_learner_keeps_which_weights_were_used(inference, spare_too):
    """Those that no loss has depended on are at the prior, however often the learner is cloned and stepped."""
    options = {"prior_precision": 50.0, "temperature": 0.01, "second_order": "all"}
    niw = NIW(Spare(), lr=0.1, allow_unused=True, inference=inference, **options)
    learner, x = niw.clone(), torch.randn(4, 3)
    learner.adapt(learner(x).square().mean())
    if spare_too:
        learner.adapt(learner(x, spare=True).square().mean())
    twin = learner.clone()
    ours, theirs = twin.posterior(), learner.posterior()
    for name in theirs.mean:
        assert torch.equal(ours.mean[name], theirs.mean[name]), name
        assert torch.equal(ours.variance[name], theirs.variance[name]), name
    assert torch.equal(twin.kl(), learner.kl())
    own = niw.module.spare.weight
    at_prior = torch.allclose(ours.variance["spare.weight"], torch.tensor(1 / 50.0), rtol=1e-4)
    assert at_prior == (not spare_too)
    twin.adapt(twin(x).square().mean())
    after = twin.clone().posterior()
    assert torch.allclose(after.variance["spare.weight"], ours.variance["spare.weight"])
    assert torch.allclose(after.mean["spare.weight"], own) == (not spare_too)


@pytest.mark.parametrize("average_iterates", [False, True])
@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_a_clone_goes_on_with_the_chain_s_moments(inference, average_iterates, double):
    """Cloned after every step or never, a learner has the same posterior."""
    options = {"inference": inference, "average_iterates": average_iterates, "burn_in": 1}
    niw = NIW(nn.Linear(3, 2), lr=0.1, temperature=0.1, **options)
    x, found = torch.randn(4, 3), []
    for clones in (False, True):
        torch.manual_seed(1)
        learner = niw.clone()
        for _ in range(4):
            learner.adapt(learner(x).square().mean())
            learner = learner.clone() if clones else learner
        found.append(learner.posterior())
    for part in ("mean", "variance"):
        for a, b in zip(*(getattr(post, part).values() for post in found)):
            assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("change", ["assign", "double"])
def test_a_wrapper_follows_its_parameters_between_clones(change):
    niw, x = NIW(nn.Linear(3, 2), lr=0.1), torch.randn(4, 3)
    niw.clone()
    if change == "assign":
        ones = {k: torch.ones_like(v) for k, v in niw.state_dict().items()}
        niw.load_state_dict({**ones, "hyper.full_wishart": niw.hyper.full_wishart}, assign=True)
    else:
        niw, x = niw.double(), x.double()
    learner = niw.clone()
    assert torch.equal(learner(x), niw.module(x))
    learner.adapt(learner(x).square().mean())
    learner(x + 1).square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in niw.parameters())


def test_a_clone_made_in_inference_mode_says_that_it_cannot_adapt():
    niw, x = NIW(nn.Linear(3, 2), lr=0.1), torch.randn(4, 3)
    with torch.inference_mode():
        learner = niw.clone()
    assert torch.equal(learner(x), niw.module(x))
    with pytest.raises(LossError, match="inference_mode"):
        learner.adapt(learner(x).square().mean())


@pytest.mark.parametrize("part", ["m_0", "V_0 and n_0"])
@pytest.mark.parametrize("moment", ["before adapt", "before the query", "before backward"])
@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_a_learner_is_of_the_time_when_it_was_cloned(inference, moment, part, double):
    """As with MAML, an optimiser's step between its clone and its backward changes none of its gradients."""

    def gradients(change):
        def pause(here):
            if here == moment and change:
                with torch.no_grad():
                    for p in niw.module.parameters() if part == "m_0" else niw.hyper.parameters():
                        p.add_(change)

        torch.manual_seed(0)
        niw = NIW(nn.Linear(3, 2), lr=0.3, temperature=0.01, prior_precision=1e3, inference=inference)
        learner, x = niw.clone(), torch.randn(4, 3)
        pause("before adapt")
        for _ in range(3):
            learner.adapt(learner(x).square().mean())
        pause("before the query")
        value = learner(x + 1).square().mean()
        pause("before backward")
        value.backward()
        return [p.grad for p in niw.parameters()]

    for found, expected in zip(gradients(1.0), gradients(0.0)):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
