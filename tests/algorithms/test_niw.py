"""The wrapper as a whole: its objective and gradients, its options, its state."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from written_out import LR, STEPS, Noise, adapted, episode, network, task

from l2l_niw import NIW
from l2l_niw.errors import ArgumentError
from l2l_niw.inference.closed_form import episode_posterior
from l2l_niw.inference.wishart import WISHARTS

INFERENCE, SECOND_ORDER, BURN_IN = ("langevin", "closed_form"), ("none", "last_layer", "all"), 2


@pytest.fixture(autouse=True)
def in_double(double):
    pass


@pytest.fixture
def noise(monkeypatch):
    """The numbers that `Noise` gives, from its first step on."""
    found = Noise()
    monkeypatch.setattr(torch, "randn_like", found)
    return found


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def vary(niw):
    """L_0 away from where it starts, where weights would be alike."""
    with torch.no_grad():
        for v in niw.hyper.log_variance:
            v.add_(0.3 * torch.randn(v.shape))
    return niw


def wrapper(**options):
    return vary(NIW(network(), **{"lr": LR, "temperature": 0.01, "prior_precision": 30.0, "kl_weight": 0.5, **options}))


def assert_written_out(niw, data, noise, steps=STEPS):
    """The values and gradients of an unmodified loop, against those of the formulas."""
    learner = adapted(niw, data, steps)
    loss = F.cross_entropy(learner(data[2]), data[3])
    loss.backward()
    expected, kl, gradients, theta = episode(niw, data, noise, steps)
    assert torch.allclose(loss, expected, rtol=0, atol=1e-12)
    for p, t in zip(learner.parameters(), theta):
        assert torch.allclose(p, t, rtol=0, atol=1e-12)
    if kl is not None:
        assert torch.allclose(learner.kl(), kl, rtol=1e-12)
    for (name, p), g in zip(niw.named_parameters(), gradients):
        assert (p.grad - g).abs().max() < 1e-10, name


@pytest.mark.parametrize("learn_step_sizes", [True, False], ids=["learned steps", "equal steps"])
@pytest.mark.parametrize("average_iterates", [False, True], ids=["last iterate", "averaged"])
@pytest.mark.parametrize("second_order", SECOND_ORDER)
@pytest.mark.parametrize("inference", INFERENCE)
def test_an_unmodified_loop_gets_the_gradient_of_the_written_out_objective(
    inference, second_order, average_iterates, learn_step_sizes, noise
):
    options = {"inference": inference, "second_order": second_order, "average_iterates": average_iterates}
    niw = wrapper(**options, burn_in=BURN_IN, learn_step_sizes=learn_step_sizes)
    assert_written_out(niw, task(), noise)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("inference", INFERENCE)
def test_so_it_does_for_either_wishart_and_after_any_number_of_steps(inference, wishart, steps, noise):
    assert_written_out(wrapper(inference=inference, wishart=wishart), task(), noise, steps)


@pytest.mark.parametrize("options", [{"first_order": True}, {"kl_weight": 0.0}, {"kl_weight": None}], ids=str)
@pytest.mark.parametrize("inference", INFERENCE)
def test_so_it_does_in_first_order_and_with_any_weight_of_the_kl(inference, options, noise):
    assert_written_out(wrapper(inference=inference, **options), task(), noise)


@pytest.mark.parametrize("average_iterates", [False, True], ids=["last iterate", "averaged"])
@pytest.mark.parametrize("second_order", SECOND_ORDER)
@pytest.mark.parametrize("inference", INFERENCE)
def test_so_it_does_at_temperature_zero(inference, average_iterates, second_order, noise):
    options = {"inference": inference, "second_order": second_order, "average_iterates": average_iterates}
    assert_written_out(wrapper(temperature=0.0, kl_weight=None, **options), task(), noise)


@pytest.mark.parametrize("second_order", SECOND_ORDER)
def test_by_default_the_query_runs_at_the_posterior_s_mean_which_is_where_the_learner_is(second_order):
    niw, data = wrapper(second_order=second_order), task()
    learner = adapted(niw, data)
    post, weights = learner.posterior(), dict(learner.module.named_parameters())
    assert list(post.mean) == list(weights)
    for name, mean in post.mean.items():
        assert torch.equal(mean, weights[name])
    expected = torch.func.functional_call(niw.module, {k: v.detach() for k, v in post.mean.items()}, (data[2],))
    assert torch.equal(learner(data[2]), expected)
    assert torch.equal(learner.query(data[2]), expected)


def test_steps_grow_with_the_variance_that_was_learned():
    """D = 4 of one parameter: four times the drift, twice the noise. The prior is so wide that it plays no part."""
    model, (x, y, *_) = network(), task()

    def step(learn_step_sizes):
        torch.manual_seed(5)
        niw = NIW(model, lr=LR, temperature=0.01, prior_precision=1e-12, learn_step_sizes=learn_step_sizes)
        with torch.no_grad():
            niw.hyper.log_variance[0].add_(math.log(4.0))
        learner = niw.clone()
        loss = F.cross_entropy(learner(x), y)
        gradients = torch.autograd.grad(loss, list(learner.parameters()), retain_graph=True)
        learner.adapt(loss)
        return [new - old for new, old in zip(learner.parameters(), model.parameters())], gradients

    (scaled, gradients), (plain, _) = step(True), step(False)
    noise = plain[0] + LR * gradients[0]
    assert noise.abs().max() > 1e-3
    assert torch.allclose(scaled[0], -LR * 4 * gradients[0] + 2 * noise)
    assert torch.allclose(scaled[1], plain[1])


@pytest.mark.parametrize("inference", INFERENCE)
def test_the_explicit_objective_has_the_same_gradient(inference):
    data, gradients = task(), []
    for add_kl_gradient in (True, False):
        torch.manual_seed(5)
        niw = wrapper(inference=inference, add_kl_gradient=add_kl_gradient)
        learner = adapted(niw, data)
        loss = F.cross_entropy(learner(data[2]), data[3])
        (loss if add_kl_gradient else learner.objective(loss)).backward()
        gradients.append(flat(p.grad for p in niw.parameters()))
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


def test_the_explicit_objective_needs_n_unless_there_was_one_forward():
    data = task()
    niw = wrapper(add_kl_gradient=False)
    learner = adapted(niw, data)
    with pytest.raises(ArgumentError, match="no forwards.*Pass n"):
        learner.objective(torch.zeros(()))
    loss = F.cross_entropy(learner(data[2]), data[3])
    expected = loss + 0.5 * learner.kl() / 11
    assert torch.allclose(learner.objective(loss), expected)
    learner(data[0])
    with pytest.raises(ArgumentError, match="several forwards.*Pass n"):
        learner.objective(loss)
    assert torch.allclose(learner.objective(loss, n=11), expected)
    assert torch.allclose(learner.objective(loss, n=22), loss + 0.5 * learner.kl() / 22)


@pytest.mark.parametrize("inference", INFERENCE)
def test_the_posterior_is_differentiable_in_l0(inference):
    """In closed form as Eq. 13 is, to which the chain's moments are constants; else its mean moves with the chain."""
    niw, data = wrapper(inference=inference, second_order="none", learn_step_sizes=False), task()
    learner = adapted(niw, data)
    post = learner.posterior()
    flat(post.mean.values()).sum().backward()
    in_m0, in_variance = flat(p.grad for p in niw.module.parameters()), flat(p.grad for p in niw.hyper.log_variance)
    assert in_variance.abs().min() > 0
    if inference == "langevin":
        assert torch.allclose(in_m0, torch.ones_like(in_m0))
        return
    m0, log_variance = flat(niw.module.parameters()), flat(niw.hyper.log_variance).detach().requires_grad_()
    theta, a = flat(learner.parameters()).detach(), torch.tensor(len(data[1]) / (2 * LR * 0.01))
    mean, variance = episode_posterior(m0.detach(), torch.exp(-log_variance), theta, a)
    assert torch.allclose(flat(post.mean.values()), mean)
    assert torch.allclose(flat(post.variance.values()), variance)
    p0 = (-log_variance).exp()
    assert torch.allclose(in_m0, p0 / (a + p0))
    assert torch.allclose(in_variance, torch.autograd.grad(mean.sum(), log_variance)[0])


@pytest.mark.parametrize("inference", INFERENCE)
def test_the_posterior_s_variance_is_that_of_the_kept_iterates(inference):
    options = {"average_iterates": True, "burn_in": BURN_IN, "learn_step_sizes": False}
    niw, (x, y, *_) = wrapper(inference=inference, **options), task()
    learner, seen = niw.clone(), []
    for _ in range(6):
        learner.adapt(F.cross_entropy(learner(x), y))
        seen.append(flat(learner.parameters()).detach())
    kept = torch.stack(seen[BURN_IN:])
    expected = (kept.var(0, unbiased=False) * len(kept) + 2 * LR * 0.01 / len(y)) / len(kept)
    mean = kept.mean(0)
    if inference == "closed_form":
        expected = 1 / (1 / expected + (-flat(niw.hyper.log_variance)).exp())
        mean = mean + (expected * (-flat(niw.hyper.log_variance)).exp()) * (flat(niw.module.parameters()) - mean)
    post = learner.posterior()
    assert torch.allclose(flat(post.variance.values()), expected)
    assert torch.allclose(flat(post.mean.values()), mean)


def test_samples_have_the_posterior_s_moments_and_predictions_are_their_outputs():
    niw, data = wrapper(temperature=0.1), task()
    post = adapted(niw, data).posterior()
    draws = torch.stack([flat(post.sample().values()) for _ in range(4000)])
    assert not draws.requires_grad
    error = (draws.mean(0) - flat(post.mean.values())) / (flat(post.variance.values()) / len(draws)).sqrt()
    assert error.abs().max() < 5
    assert torch.allclose(draws.var(0), flat(post.variance.values()), rtol=0.15)
    torch.manual_seed(7)
    outputs = post.predict(data[2], samples=2)
    torch.manual_seed(7)
    expected = [torch.func.functional_call(niw.module, post.sample(), (data[2],)) for _ in range(2)]
    assert torch.allclose(outputs, torch.stack(expected))
    assert outputs.requires_grad


def test_a_seed_makes_an_episode_repeatable():
    model, data = network(), task()

    def run():
        torch.manual_seed(11)
        return adapted(NIW(model, lr=LR), data).posterior().predict(data[2], samples=3)

    assert torch.equal(run(), run())


@pytest.mark.parametrize("wishart", WISHARTS)
def test_a_state_dict_restores_a_trained_wrapper(wishart, tmp_path):
    niw, data = NIW(network(), lr=LR, wishart=wishart), task()
    opt = torch.optim.Adam(niw.parameters(), 0.1)
    F.cross_entropy(adapted(niw, data)(data[2]), data[3]).backward()
    opt.step()
    torch.save(niw.state_dict(), tmp_path / "niw.pt")
    other = NIW(network(), lr=LR, wishart=wishart)
    other.load_state_dict(torch.load(tmp_path / "niw.pt", weights_only=True))
    for a, b in zip(niw.prior().variance.values(), other.prior().variance.values()):
        assert torch.equal(a, b)
    assert torch.equal(niw.module(data[0]), other.module(data[0]))


def test_the_wrapper_runs_the_model():
    niw, (x, *_) = NIW(network(), lr=LR), task()
    assert torch.equal(niw(x), niw.module(x))


def test_the_prior_is_the_mode():
    model = network()
    d = sum(p.numel() for p in model.parameters())
    factorised = NIW(model, lr=0.1, prior_precision=7.0, n0=4.0).prior()
    full = NIW(model, lr=0.1, prior_precision=7.0, n0=d + 3.0, wishart="full").prior()
    for name, p in model.named_parameters():
        assert torch.equal(factorised.mean[name], p)
        assert torch.allclose(factorised.variance[name], torch.tensor(4.0 / 7.0 / (4.0 + 3)))
        assert torch.allclose(full.variance[name], torch.tensor((d + 3.0) / 7.0 / (2 * d + 5.0)))


@pytest.mark.parametrize("wishart", WISHARTS)
def test_degrees_of_freedom_begin_at_the_authors_one_or_above_the_smallest_integer(wishart):
    model = network()
    d = sum(p.numel() for p in model.parameters())
    niw = NIW(model, lr=0.1, wishart=wishart)
    assert niw._prior().n0.item() == pytest.approx(d + 1 if wishart == "full" else 1)


def test_a_wider_prior_takes_steps_of_the_same_size():
    niw, (x, y, *_) = NIW(network(), lr=LR, temperature=0.01, inference="closed_form"), task()
    with torch.no_grad():
        niw.hyper.log_variance[0].add_(1.0)

    def seen():
        torch.manual_seed(5)
        learner = niw.clone()
        learner.adapt(F.cross_entropy(learner(x), y))
        return niw.prior().variance, [p.detach().clone() for p in learner.parameters()]

    before, steps = seen()
    niw.scale_prior_std(3.0)
    after, same = seen()
    assert all(torch.allclose(after[name], 9.0 * before[name]) for name in before)
    assert all(torch.allclose(new, old) for new, old in zip(same, steps))
    with pytest.raises(ArgumentError, match="factor"):
        niw.scale_prior_std(0.0)


@pytest.mark.parametrize("inference", INFERENCE)
def test_diagnostics_tell_how_far_each_layer_adapts_and_what_is_clamped(inference):
    model, data = network(), task()
    options = {"temperature": 0.01, "inference": inference}
    niw = NIW(model, lr=LR, precision_bounds=(1e-4, 200.0), prior_precision=100.0, **options)
    adapted(niw, data)
    report = niw.diagnostics()
    assert set(report["layers"]) == {name for name, _ in model.named_parameters()}
    assert report["clamped"] == 1.0
    for layer in report["layers"].values():
        assert layer["chain_precision"] == pytest.approx(200.0)
        assert layer["prior_precision"] == pytest.approx(100.0)
        # in closed form A = 200 is the likelihood's precision; else the posterior's, of which 100 are the prior's
        assert layer["share"] == pytest.approx(2 / 3 if inference == "closed_form" else 1 / 2)
        assert layer["clamped"] == 1.0
    loose = NIW(model, lr=LR, **options)
    adapted(loose, data)
    report = loose.diagnostics()
    assert report["clamped"] == 0.0
    assert report["n0"] == pytest.approx(1.0)
    for layer in report["layers"].values():
        assert layer["chain_precision"] == pytest.approx(len(data[1]) / (2 * LR * 0.01))


@pytest.mark.parametrize("inference", INFERENCE)
def test_half_precision_models_keep_float32_hyperparameters(inference):
    model = nn.Linear(3, 2).to(torch.bfloat16)
    niw, x = NIW(model, lr=0.1, inference=inference), torch.randn(4, 3, dtype=torch.bfloat16)
    learner = niw.clone()
    for _ in range(4):
        learner.adapt(learner(x).square().mean())
    assert learner.module.weight.dtype == torch.bfloat16
    learner(x + 1).square().mean().backward()
    assert model.weight.grad.dtype == torch.bfloat16
    assert niw.hyper.log_variance[0].grad.dtype == torch.float32
    assert niw.hyper.log_variance[0].grad.abs().max() > 0


def test_a_wrapper_follows_to_another_dtype():
    niw = NIW(nn.Linear(3, 2), lr=0.1).float()
    learner, x = niw.clone(), torch.randn(4, 3, dtype=torch.float32)
    for _ in range(3):
        learner.adapt(learner(x).square().mean())
    assert learner.posterior().predict(x).dtype == torch.float32


def test_the_kl_s_gradient_follows_the_temperature_until_its_weight_is_set():
    niw, data = NIW(network(), lr=LR, temperature=0.01), task()
    assert niw.options.kl_weight == 0.01
    niw.options.temperature = 0.2
    assert niw.options.kl_weight == 0.2

    def in_n0():
        niw.zero_grad()
        torch.manual_seed(5)
        F.cross_entropy(adapted(niw, data)(data[2]), data[3]).backward()
        return niw.hyper.raw_n0.grad.item()

    half = torch.tensor(0.5, requires_grad=True)  # n_0 / 2; in raw_n0 the derivative is n_0 / 2 times that in n_0 / 2
    d = sum(p.numel() for p in niw.module.parameters())
    (slope,) = torch.autograd.grad(d * (half.log() - torch.digamma(half)) / 2, half)
    assert in_n0() == pytest.approx(0.2 / 11 * 0.5 * slope.item())
    niw.options.kl_weight = 0.7
    niw.options.temperature = 0.1
    assert niw.options.kl_weight == 0.7
    assert in_n0() == pytest.approx(0.7 / 11 * 0.5 * slope.item())
    niw.options.kl_weight = None
    assert niw.options.kl_weight == 0.1
