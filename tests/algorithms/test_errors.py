"""Bad input: one clear error each, which names the argument and the remedy, and leaves the learner as it was."""

import math

import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.errors import ArgumentError, ChainError, CheckpointError, LossError, ModelError
from l2l_niw.inference.curvature import GGN

every_order = pytest.mark.parametrize("second_order", ["none", "last_layer", "all"])


def learner_and_data(steps=3, **options):
    niw = NIW(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), lr=0.1, **options)
    learner, x = niw.clone(), torch.randn(6, 4)
    for _ in range(steps):
        learner.adapt(learner(x).square().mean())
    return learner, x


def fingerprint(learner, x):
    """Everything that a failed call must not change."""
    with torch.no_grad():
        outputs = learner(x)
    post = learner.posterior()
    return [outputs, *learner.parameters(), *post.mean.values(), *post.variance.values()], learner._chain.steps


def test_a_loss_that_is_not_finite_is_told_before_labels_are_sampled():
    learner, x = learner_and_data(curvature="ggn")
    with pytest.raises(LossError, match="is nan"):
        learner.adapt(learner(x * math.nan).square().mean())


@pytest.mark.parametrize(
    ("make_loss", "message"),
    [
        (lambda learner, x: learner(x).square().mean() * math.nan, "is nan"),
        (lambda learner, x: learner(x).square().mean() / 0.0, "is inf"),
        (lambda learner, x: learner(x[:0]).square().mean(), "empty support"),
        (lambda learner, x: learner(x).square().mean().detach(), "has no graph"),
        (lambda learner, x: learner.niw.module(x).mean(), "does not depend on this learner's weights"),
        (lambda learner, x: learner(x).square(), "must be a scalar"),
        (lambda learner, x: learner(x).square().mean().item(), "must be a scalar"),
        (lambda learner, x: learner.module[0](x).square().mean(), "'2.weight'.*allow_unused=True"),
        (lambda learner, x: learner(x).square().sum().sub(learner(x).square().sum()).sqrt(), "gradient.*not finite"),
    ],
    ids=["nan", "inf", "empty", "detached", "foreign", "vector", "float", "unused", "bad gradient"],
)
@every_order
@pytest.mark.parametrize("inference", ["langevin", "closed_form"])
def test_a_bad_loss_is_named_and_changes_nothing(inference, second_order, make_loss, message):
    learner, x = learner_and_data(inference=inference, second_order=second_order)
    before, steps = fingerprint(learner, x)
    with pytest.raises(LossError, match=message):
        learner.adapt(make_loss(learner, x))
    after, steps_after = fingerprint(learner, x)
    assert steps == steps_after
    for a, b in zip(before, after):
        assert torch.equal(a, b)
    learner.adapt(learner(x).square().mean())


@every_order
def test_a_loss_cannot_be_used_twice(second_order):
    learner, x = learner_and_data(second_order=second_order)
    loss = learner(x).square().mean()
    loss.backward()
    before, _ = fingerprint(learner, x)
    with pytest.raises(LossError, match="freed by an earlier backward"):
        learner.adapt(loss)
    for a, b in zip(before, fingerprint(learner, x)[0]):
        assert torch.equal(a, b)


@every_order
def test_a_loss_that_was_stepped_on_cannot_be_stepped_on_again(second_order):
    learner, x = learner_and_data(second_order=second_order)
    loss = learner(x).square().mean()
    learner.adapt(loss)
    with pytest.raises(LossError, match="after its last adapt|freed by an earlier"):
        learner.adapt(loss)


@every_order
def test_a_loss_from_before_the_last_step_is_refused(second_order):
    learner, x = learner_and_data(steps=0, second_order=second_order)
    first, second = learner(x).square().mean(), learner(x).abs().mean()
    learner.adapt(first)
    with pytest.raises(LossError, match="after its last adapt"):
        learner.adapt(second)


@pytest.mark.parametrize("call", ["posterior", "kl"])
def test_no_posterior_before_a_step(call):
    learner, _ = learner_and_data(steps=0)
    with pytest.raises(ChainError, match=f"{call}: .*adapt"):
        getattr(learner, call)()


def test_within_the_burn_in_the_last_iterate_stands_for_all():
    learner, _ = learner_and_data(steps=1, average_iterates=True, burn_in=2)
    post = learner.posterior()
    for mean, p in zip(post.mean.values(), learner.parameters()):
        assert torch.equal(mean, p)
    for variance in post.variance.values():
        assert torch.allclose(variance, torch.tensor(2 * 0.1 * 1e-4 / 6))


def test_at_temperature_zero_there_is_no_kl():
    learner, _ = learner_and_data(temperature=0.0)
    with pytest.raises(ChainError, match="temperature=0"):
        learner.kl()


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": 0.0},
        {"lr": -1.0},
        {"lr": math.nan},
        {"lr": math.inf},
        {"burn_in": -1},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"prior_precision": 0.0},
        {"prior_precision": -2.0},
        {"n0": 0.0},
        {"n0": 3.0, "wishart": "full"},
        {"n0": math.nan},
        {"precision_bounds": (0.0, 1.0)},
        {"precision_bounds": (2.0, 1.0)},
        {"wishart": "half"},
        {"kl_weight": -1.0},
        {"second_order": "some"},
        {"temperature": 0.0, "curvature": "ggn"},
        {"inference": "exact"},
        {"average_iterates": None},
        {"add_kl_gradient": 1},
        {"learn_step_sizes": 0},
        {"lr": "0.1"},
        {"burn_in": 1.5},
        {"precision_bounds": (1.0,)},
        {"precision_bounds": None},
        {"curvature": GGN},
    ],
    ids=str,
)
def test_options_outside_their_domain_are_named(bad):
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        NIW(nn.Linear(4, 2), **{"lr": 0.1, **bad})


def test_models_that_cannot_be_random_are_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameter.*requires_grad_"):
        NIW(frozen, lr=0.1)
    with pytest.raises(ModelError, match="no trainable parameter"):
        NIW(nn.Tanh(), lr=0.1)
    with pytest.raises(ModelError, match="must be a torch.nn.Module"):
        NIW(torch.tanh, lr=0.1)
    with pytest.raises(ModelError, match="has no shape yet"):
        NIW(nn.LazyLinear(2), lr=0.1)
    for dtype in (torch.complex64, torch.int64):
        model = nn.Linear(2, 2)
        model.extra = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        with pytest.raises(ModelError, match="'extra' is torch"):
            NIW(model, lr=0.1)


def test_a_model_changed_after_wrapping_is_refused():
    niw = NIW(nn.Sequential(nn.Linear(2, 2)), lr=0.1)
    niw.module.append(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="then wrap it"):
        niw.clone()


def test_counts_and_samples_are_checked():
    learner, x = learner_and_data()
    with pytest.raises(ArgumentError, match="n, the number of examples"):
        learner.adapt(learner(x).mean(), n=0)
    with pytest.raises(ArgumentError, match="samples"):
        learner.posterior().predict(x, samples=0)


def test_models_with_several_outputs_predict_one_network_at_a_time():
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    learner, x = NIW(Two(3, 2), lr=0.1).clone(), torch.randn(4, 3)
    learner.adapt(learner(x)[0].square().mean())
    post = learner.posterior()
    with pytest.raises(ArgumentError, match="post.network"):
        post.predict(x)
    assert post.network(post.sample())(x)[0].shape == (4, 2)


def test_an_n0_that_training_drove_out_of_its_domain_is_noticed():
    niw = NIW(nn.Linear(2, 1), lr=0.1, wishart="full")
    with torch.no_grad():
        niw.hyper.raw_n0.fill_(-100.0)
    with pytest.raises(ArgumentError, match="raw_n0.*leaves its domain"):
        niw.clone()


def test_diagnostics_before_any_episode():
    with pytest.raises(ChainError, match="no learner has adapted"):
        NIW(nn.Linear(2, 1), lr=0.1).diagnostics()


def test_a_checkpoint_of_another_model_says_what_differs():
    niw = NIW(nn.Linear(4, 2), lr=0.1)
    before = {k: v.clone() for k, v in niw.state_dict().items()}
    with pytest.raises(CheckpointError, match="'module.weight' has shape"):
        niw.load_state_dict(NIW(nn.Linear(5, 2), lr=0.1).state_dict())
    with pytest.raises(CheckpointError, match="'module.bias' is missing"):
        niw.load_state_dict(NIW(nn.Linear(4, 2, bias=False), lr=0.1).state_dict())
    with pytest.raises(CheckpointError, match="another wishart"):
        niw.load_state_dict(NIW(nn.Linear(4, 2), lr=0.1, wishart="full").state_dict())
    with pytest.raises(CheckpointError, match="niw.module.load_state_dict"):
        niw.load_state_dict(nn.Linear(4, 2).state_dict())
    for k, v in niw.state_dict().items():
        assert torch.equal(v, before[k])


def test_the_explicit_objective_is_refused_when_the_kl_is_added_anyway():
    learner, x = learner_and_data()
    with pytest.raises(ArgumentError, match="add_kl_gradient=False"):
        learner.objective(learner(x).mean())


def test_a_checkpoint_that_is_not_finite_is_refused():
    niw = NIW(nn.Linear(4, 2), lr=0.1)
    state = niw.state_dict()
    state["hyper.log_variance.0"] = torch.full_like(state["hyper.log_variance.0"], math.nan)
    with pytest.raises(CheckpointError, match="'hyper.log_variance.0' is not finite"):
        niw.load_state_dict(state)


def test_ggn_needs_the_learner_s_own_outputs():
    learner, x = learner_and_data(steps=0, curvature="ggn")
    with pytest.raises(ChainError, match="learner\\(x\\)"):
        learner.adapt(learner.module(x).square().mean())
