"""The wrapper as a whole: its objective and gradients, its options, its state."""

import pytest
import torch
from torch import nn

from l2l_niw import NIW
from l2l_niw.closed_form import episode_posterior
from l2l_niw.errors import ArgumentError
from l2l_niw.wishart import WISHARTS

STEPS, BURN_IN = 5, 2


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def problem():
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, torch.randn(5, 3), torch.randint(2, (5,)), torch.randn(11, 3), torch.randint(2, (11,))


def episode(niw, x, y):
    learner = niw.clone()
    iterates = []
    for _ in range(STEPS):
        learner.adapt(nn.functional.cross_entropy(learner(x), y))
        iterates.append(torch.cat([p.detach().flatten() for p in learner.parameters()]))
    return learner, torch.stack(iterates)


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def written_out(niw, iterates, x_query, y_query, n, trace):
    """f_i + kl_weight * KL / n from stored iterates and the formulas, as functions of new leaves for L_0."""
    model = niw.module
    m0 = flat(model.parameters()).detach().requires_grad_()
    log_variance = flat(niw.log_variance).detach().requires_grad_()
    raw = niw.raw_n0.detach().clone().requires_grad_()
    d = m0.numel()
    n0 = raw.exp() + (d - 1 if niw.options.wishart == "full" else 0)
    kept = iterates[BURN_IN:]
    pseudo = 2 * niw.lr * niw.options.temperature / n
    a = len(kept) / ((kept - kept.mean(0)).square().sum(0) + pseudo)
    m_bar, p0 = kept.mean(0), 1 / log_variance.exp()
    mean = (a * m_bar + p0 * m0) / (a + p0)
    variance = 1 / (a + p0)
    if trace == "first":  # the chain began at m_0 and its steps are proportional to V_0
        growth = log_variance.exp() / log_variance.detach().exp()
        m_bar, offset = m0 + growth * (m_bar - m0.detach()), growth * (iterates[-1] - m_bar)
    else:
        offset = iterates[-1] - m_bar
    theta = (a * m_bar + p0 * m0) / (a + p0) + variance.sqrt() * a.sqrt() * offset
    parts = theta.split([p.numel() for p in model.parameters()])
    weights = {k: part.view_as(p) for (k, p), part in zip(model.named_parameters(), parts)}
    f = nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x_query,)), y_query)
    j = torch.arange(1, d + 1)
    psi = torch.digamma(n0 / 2 + (1 - j) / 2).sum() if niw.options.wishart == "full" else d * torch.digamma(n0 / 2)
    log_v0 = log_variance + n0.log()
    kl = 0.5 * (
        -d * torch.log(torch.tensor(2 * torch.e)) + (log_v0 - variance.log()).sum() - psi
        + (p0 * (mean - m0).square()).sum() + (p0 * variance).sum()
    )
    return f, kl, torch.autograd.grad(f + niw.options.kl_weight * kl / len(y_query), (m0, log_variance, raw))


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("trace", ["none", "first"])
def test_an_unmodified_loop_gets_the_gradient_of_the_written_out_objective(wishart, trace):
    model, x, y, x_query, y_query = problem()
    options = {"burn_in": BURN_IN, "wishart": wishart, "trace": trace}
    niw = NIW(model, lr=0.3, temperature=0.01, prior_precision=30.0, kl_weight=0.5, **options)
    learner, iterates = episode(niw, x, y)
    loss = nn.functional.cross_entropy(learner(x_query), y_query)
    loss.backward()
    f, kl, (g_m0, g_log_variance, g_raw) = written_out(niw, iterates, x_query, y_query, len(y), trace)
    assert torch.allclose(loss, f, atol=1e-12)
    assert torch.allclose(learner.kl(), kl)
    assert torch.allclose(flat(p.grad for p in model.parameters()), g_m0, atol=1e-10)
    assert torch.allclose(flat(p.grad for p in niw.log_variance), g_log_variance, atol=1e-10)
    assert torch.allclose(niw.raw_n0.grad, g_raw, atol=1e-10)


def test_steps_grow_with_the_variance_that_was_learned():
    model, x, y, _, _ = problem()

    def step(precondition):
        torch.manual_seed(5)
        niw = NIW(model, lr=0.3, temperature=0.01, precondition=precondition)
        with torch.no_grad():
            niw.log_variance[0].add_(torch.log(torch.tensor(4.0)))
        learner = niw.clone()
        loss = nn.functional.cross_entropy(learner(x), y)
        gradients = torch.autograd.grad(loss, list(learner.parameters()), retain_graph=True)
        learner.adapt(loss)
        moved = [new - old for new, old in zip(learner.parameters(), model.parameters())]
        return moved, gradients

    (scaled, gradients), (plain, _) = step(True), step(False)
    noise = plain[0] + 0.3 * gradients[0]
    assert torch.allclose(scaled[0], -0.3 * 4 * gradients[0] + 2 * noise)
    assert torch.allclose(scaled[1], plain[1])


def test_the_explicit_objective_has_the_same_gradient():
    model, x, y, x_query, y_query = problem()
    gradients = []
    for auto in (True, False):
        torch.manual_seed(5)
        niw = NIW(model, lr=0.3, temperature=0.01, kl_weight=0.5, auto_kl=auto)
        niw.zero_grad()
        learner, _ = episode(niw, x, y)
        loss = nn.functional.cross_entropy(learner(x_query), y_query)
        (loss if auto else learner.objective(loss)).backward()
        gradients.append(flat(p.grad for p in niw.parameters()))
    assert torch.allclose(*gradients, atol=1e-12)


def test_the_kl_comes_once_however_often_the_query_is_split():
    model, x, y, x_query, y_query = problem()
    niw = NIW(model, lr=0.3, temperature=0.01, kl_weight=0.5)

    def gradient(parts):
        torch.manual_seed(5)
        niw.zero_grad()
        learner, _ = episode(niw, x, y)
        for part in parts:
            outputs = learner(x_query)
            (nn.functional.cross_entropy(outputs[part], y_query[part], reduction="sum") / len(y_query)).backward()
        return flat(p.grad for p in niw.parameters())

    assert torch.allclose(gradient([slice(None)]), gradient([slice(0, 4), slice(4, None)]), atol=1e-12)


def test_the_number_of_data_is_seen_or_given():
    model, x, y, x_query, _ = problem()

    def noise(n):
        torch.manual_seed(5)
        learner = NIW(model, lr=0.3, temperature=1.0).clone()
        loss = nn.functional.cross_entropy(learner(x), y)
        step = flat(torch.autograd.grad(loss, list(learner.parameters()), retain_graph=True))
        learner.adapt(loss, n=n)
        return flat(learner.parameters()) - flat(model.parameters()) + 0.3 * step

    assert torch.allclose(noise(None), noise(5))
    assert torch.allclose(noise(None), noise(500) * 10)


def test_forwards_on_the_support_follow_the_chain_and_queries_the_posterior():
    model, x, y, x_query, _ = problem()
    niw = NIW(model, lr=0.3, temperature=0.01, prior_precision=1e3)
    learner, iterates = episode(niw, x, y)
    parts = iterates[-1].split([p.numel() for p in model.parameters()])
    state = {k: part.view_as(p) for (k, p), part in zip(model.named_parameters(), parts)}
    at_chain = torch.func.functional_call(model, state, (x,))
    assert torch.equal(learner(x), at_chain)
    assert torch.equal(learner(x.clone()), at_chain)
    assert not torch.allclose(learner(x_query), torch.func.functional_call(model, state, (x_query,)))
    assert torch.equal(learner(x_query), learner(x_query))
    assert torch.equal(learner(x), at_chain)


def test_inner_steps_on_other_minibatches_are_steps_too():
    model, x, y, _, _ = problem()
    learner = NIW(model, lr=0.3, temperature=1e-6).clone()
    first = nn.functional.cross_entropy(learner(x), y).item()
    for i in range(20):
        part = slice(0, 3) if i % 2 else slice(2, 5)
        learner.adapt(nn.functional.cross_entropy(learner(x[part] + 0.0), y[part]))
    assert nn.functional.cross_entropy(learner(x), y) < first


def test_the_posterior_is_differentiable_in_l0_and_its_mean_is_the_closed_form():
    model, x, y, _, _ = problem()
    niw = NIW(model, lr=0.3, temperature=0.01, prior_precision=50.0, burn_in=BURN_IN, trace="none")
    learner, iterates = episode(niw, x, y)
    kept = iterates[BURN_IN:]
    a = len(kept) / ((kept - kept.mean(0)).square().sum(0) + 2 * 0.3 * 0.01 / 5)
    post = learner.posterior()
    mean, variance = episode_posterior(flat(model.parameters()), -torch.tensor(50.0).log(), kept.mean(0), a)
    assert torch.allclose(flat(post.mean.values()), mean)
    assert torch.allclose(flat(post.variance.values()), variance)
    flat(post.mean.values()).sum().backward()
    assert torch.allclose(flat(p.grad for p in model.parameters()), 50.0 / (a + 50.0))
    assert all(p.grad.abs().max() > 0 for p in niw.log_variance)


def test_samples_have_the_posteriors_moments_and_predictions_are_their_outputs():
    model, x, y, x_query, _ = problem()
    niw = NIW(model, lr=0.3, temperature=0.1)
    learner, _ = episode(niw, x, y)
    post = learner.posterior()
    draws = torch.stack([flat(post.sample().values()) for _ in range(4000)])
    assert not draws.requires_grad
    error = (draws.mean(0) - flat(post.mean.values())) / (flat(post.variance.values()) / len(draws)).sqrt()
    assert error.abs().max() < 5
    assert torch.allclose(draws.var(0), flat(post.variance.values()), rtol=0.15)
    torch.manual_seed(7)
    outputs = post.predict(x_query, samples=2)
    torch.manual_seed(7)
    expected = [torch.func.functional_call(model, post.sample(), (x_query,)) for _ in range(2)]
    assert torch.allclose(outputs, torch.stack(expected))
    assert outputs.requires_grad


def test_a_seed_makes_an_episode_repeatable():
    model, x, y, x_query, _ = problem()

    def run():
        torch.manual_seed(11)
        learner, _ = episode(NIW(model, lr=0.3), x, y)
        return learner.posterior().predict(x_query, samples=3)

    assert torch.equal(run(), run())


@pytest.mark.parametrize("wishart", WISHARTS)
def test_a_state_dict_restores_a_trained_wrapper(wishart, tmp_path):
    model, x, y, x_query, y_query = problem()
    niw = NIW(model, lr=0.3, wishart=wishart)
    opt = torch.optim.Adam(niw.parameters(), 0.1)
    learner, _ = episode(niw, x, y)
    nn.functional.cross_entropy(learner(x_query), y_query).backward()
    opt.step()
    torch.save(niw.state_dict(), tmp_path / "niw.pt")
    other = NIW(problem()[0], lr=0.3, wishart=wishart)
    other.load_state_dict(torch.load(tmp_path / "niw.pt", weights_only=True))
    for a, b in zip(niw.prior().variance.values(), other.prior().variance.values()):
        assert torch.equal(a, b)
    assert torch.equal(niw(x), other(x))


def test_the_prior_is_the_mode():
    model = problem()[0]
    d = sum(p.numel() for p in model.parameters())
    factorised = NIW(model, lr=0.1, prior_precision=7.0, n0=4.0).prior()
    full = NIW(model, lr=0.1, prior_precision=7.0, n0=d + 3.0, wishart="full").prior()
    for name, p in model.named_parameters():
        assert torch.equal(factorised.mean[name], p)
        assert torch.allclose(factorised.variance[name], torch.tensor(4.0 / 7.0 / (4.0 + 3)))
        assert torch.allclose(full.variance[name], torch.tensor((d + 3.0) / 7.0 / (2 * d + 5.0)))


def test_a_wider_prior_takes_the_same_steps():
    model, x, y, _, _ = problem()
    niw = NIW(model, lr=0.3, temperature=0.01)
    with torch.no_grad():
        niw.log_variance[0].add_(1.0)

    def seen():
        torch.manual_seed(5)
        learner = niw.clone()
        learner.adapt(nn.functional.cross_entropy(learner(x), y))
        return niw.prior().variance, [p.detach().clone() for p in learner.parameters()]

    before, steps = seen()
    niw.widen(3.0)
    after, same = seen()
    assert all(torch.allclose(after[name], 9.0 * before[name]) for name in before)
    assert all(torch.allclose(new, old) for new, old in zip(same, steps))
    with pytest.raises(ArgumentError, match="factor"):
        niw.widen(0.0)


def test_diagnostics_tell_how_far_each_layer_adapts_and_what_is_clamped():
    model, x, y, _, _ = problem()
    niw = NIW(model, lr=0.3, temperature=0.01, precision_range=(1e-4, 100.0), prior_precision=100.0)
    episode(niw, x, y)
    report = niw.diagnostics()
    assert set(report["layers"]) == {name for name, _ in model.named_parameters()}
    assert report["clamped"] == 1.0
    for layer in report["layers"].values():
        assert layer["chain_precision"] == pytest.approx(100.0)
        assert layer["prior_precision"] == pytest.approx(100.0)
        assert layer["share"] == pytest.approx(0.5)
        assert layer["clamped"] == 1.0
    loose = NIW(model, lr=0.3, temperature=0.01)
    episode(loose, x, y)
    assert loose.diagnostics()["clamped"] == 0.0
    assert loose.diagnostics()["n0"] == pytest.approx(1.0)


def test_half_precision_models_keep_float32_moments():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    niw, x = NIW(model, lr=0.1), torch.randn(4, 3, dtype=torch.bfloat16)
    learner = niw.clone()
    for _ in range(4):
        learner.adapt(learner(x).square().mean())
    assert learner.module.weight.dtype == torch.bfloat16
    assert learner._chain.mean.dtype == torch.float32
    learner(x + 1).square().mean().backward()
    assert model.weight.grad.dtype == torch.bfloat16
    assert niw.log_variance[0].grad.dtype == torch.float32


def test_wrapper_follows_to_another_dtype():
    niw = NIW(nn.Linear(3, 2), lr=0.1).float()
    learner, x = niw.clone(), torch.randn(4, 3, dtype=torch.float32)
    for _ in range(3):
        learner.adapt(learner(x).square().mean())
    assert learner.posterior().predict(x).dtype == torch.float32
