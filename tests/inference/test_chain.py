import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prior_cases import make_prior

from l2l_niw.inference import chain as chains
from l2l_niw.inference.chain import (
    BLOCK,
    Settings,
    in_blocks,
    init,
    iterate_variance,
    langevin_step,
    mean_of,
    noise_like,
    restarted,
    step,
)


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def flat_prior(*shape):
    return make_prior([torch.zeros(shape)], [torch.zeros(shape)])


def run(chain, gradient, prior, n, settings, steps, scale=None):
    for _ in range(steps):
        chain = step(chain, [gradient(chain.theta[0])], prior, n, settings, scale=scale)
    return chain


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("n", [1, 10])
def test_long_chain_has_the_moments_of_the_tempered_likelihood(temperature, n):
    repeats = 4000  # independent copies of each coordinate, in one vector
    h, centre = torch.tensor([[0.5], [2.0], [8.0]]), torch.tensor([[1.0], [-2.0], [0.5]])
    settings = Settings(lr=0.02 * n, temperature=temperature, burn_in=500)
    start = init([torch.zeros(3, repeats)])
    chain = run(start, lambda theta: h * (theta - centre) / n, flat_prior(3, repeats), n, settings, steps=1500)
    # a step of lr makes the stationary variance of a linear chain T / (h - lr h^2 / 2n), exactly
    h = h.squeeze(1)
    stationary = temperature / (h - settings.lr * h.square() / (2 * n))
    assert torch.allclose(chain.theta[0].var(1), stationary, rtol=0.08)
    # one path of 1,000 correlated steps varies less about its own mean than the law itself does
    correlation = 1 - settings.lr * h / n
    kept = chain.moments.count
    assert kept == 1000
    lags = torch.arange(1, kept)
    loss = (1 + 2 * ((1 - lags / kept) * correlation[:, None] ** lags).sum(1)) / kept
    assert torch.allclose(iterate_variance(chain, 0, None).mean(1), stationary * (1 - loss), rtol=0.03)
    assert torch.allclose(mean_of(chain)[0].mean(1), centre.squeeze(1), atol=0.02 * temperature**0.5)


def test_scaled_steps_have_the_same_stationary_law():
    repeats, precision = 8000, 2.0
    scale = torch.tensor([[0.25], [1.0], [4.0]]).expand(3, repeats)
    settings = Settings(lr=0.005, temperature=1.0, learn_step_sizes=True)
    start = init([torch.zeros(3, repeats)])
    chain = run(start, lambda theta: precision * theta, flat_prior(3, repeats), 1, settings, 1500, [scale])
    assert torch.allclose(chain.theta[0].var(1), torch.tensor(1 / precision), rtol=0.06)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("temperature", "n"), [(1.0, 1), (0.3, 6)])
def test_with_the_prior_in_the_chain_its_law_is_the_exact_posterior(learned, temperature, n):
    """The conjugate posterior of a Gaussian mean: weights that the data settle, and some that the prior does."""
    repeats = 6000
    h, centre = torch.tensor([[2.0], [0.5], [4.0]]), torch.tensor([[1.0], [-2.0], [0.5]])
    m0, variance = torch.tensor([[-1.0], [1.0], [2.0]]), torch.tensor([[2.0], [0.5], [0.2]])
    prior = make_prior([m0.expand(3, repeats)], [variance.log().expand(3, repeats)], initial=0.4)
    settings = Settings(lr=0.01 * n, temperature=temperature, learn_step_sizes=learned, prior_in_chain=True)
    scale = [prior.step_scale(0)] if learned else None
    chain = init([prior.m0[0].clone()])
    chain = run(chain, lambda theta: h * (theta - centre) / n, prior, n, settings, 1500, scale)
    precision = h / temperature + 1 / variance
    mean = (h / temperature * centre + m0 / variance) / precision
    got = chain.theta[0]
    spread = precision.rsqrt()
    assert ((got.mean(1, keepdim=True) - mean).abs() < 5 * spread / repeats**0.5).all()
    assert torch.allclose(got.var(1, keepdim=True), 1 / precision, rtol=0.08)


@pytest.mark.parametrize("learned", [False, True])
def test_without_noise_the_chain_with_the_prior_ends_at_the_map_whatever_the_step_size(learned):
    h, centre = torch.tensor([2.0, 0.5, 4.0]), torch.tensor([1.0, -2.0, 0.5])
    m0, variance = torch.tensor([-1.0, 1.0, 2.0]), torch.tensor([2.0, 0.5, 0.2])
    prior = make_prior([m0], [variance.log()], initial=0.4)
    scale = [prior.step_scale(0)] if learned else None
    for lr in (0.05, 0.3):
        settings = Settings(lr, 0.7, noisy=False, learn_step_sizes=learned, prior_in_chain=True)
        chain = run(init([m0]), lambda theta: h * (theta - centre), prior, 1, settings, 3000, scale)
        map_estimate = (h / 0.7 * centre + m0 / variance) / (h / 0.7 + 1 / variance)
        assert torch.allclose(chain.theta[0], map_estimate, atol=1e-12)


def test_moments_equal_those_of_the_stored_iterates():
    iterates = torch.randn(20, 7)
    chain, settings = init([torch.zeros(7)]), Settings(lr=1.0, burn_in=5)
    for theta in iterates:
        chain = step(chain, [chain.theta[0] - theta], flat_prior(7), 1, settings)
    kept = iterates[5:]
    assert chain.moments.count == len(kept)
    assert torch.allclose(mean_of(chain)[0], kept.mean(0))
    assert torch.allclose(iterate_variance(chain, 0, None), kept.var(0, unbiased=False))


@given(steps=st.integers(1, 6), burn_in=st.integers(0, 8), pseudo=st.floats(1e-9, 1.0))
def test_few_samples_never_give_nan(steps, burn_in, pseudo):
    settings = Settings(lr=1.0, temperature=pseudo / 2, noisy=False, burn_in=burn_in)
    chain = init([torch.zeros(3)])
    for _ in range(steps):
        chain = step(chain, [torch.randn(3)], flat_prior(3), 1, settings)
    assert (chain.moments is None) == (steps <= burn_in)
    assert torch.isfinite(1 / iterate_variance(chain, 0, None)).all()
    if steps <= burn_in + 1:
        assert torch.equal(mean_of(chain)[0], chain.theta[0])
        assert torch.allclose(iterate_variance(chain, 0, None), torch.full((3,), pseudo))


@pytest.mark.parametrize("prior_in_chain", [False, True])
def test_without_temperature_a_step_is_gradient_descent(prior_in_chain):
    theta, gradient = torch.randn(5), torch.randn(5)
    settings = Settings(lr=0.1, prior_in_chain=prior_in_chain)
    chain = step(init([theta]), [gradient], flat_prior(5), 3, settings)
    assert torch.equal(chain.theta[0], theta - 0.1 * gradient)


def test_a_weight_without_a_gradient_stays_and_is_not_used():
    prior = make_prior([torch.randn(3), torch.randn(2)], [torch.zeros(3), torch.zeros(2)])
    start = [torch.randn(3), torch.randn(2)]
    chain = step(init(start), [None, torch.randn(2)], prior, 1, Settings(0.1, 1.0, prior_in_chain=True))
    assert chain.theta[0] is start[0]
    assert chain.used == (False, True)


# how iterates change with V_0


def hand_written(log_variance, m0, gradients, noises, lr, temperature, n, initial, learned):
    """The iterates as autograd sees them: gradients and noise are constants, V_0 is in D and in P_0."""
    theta, iterates = m0, []
    for gradient, noise in zip(gradients, noises):
        d = torch.exp(log_variance - initial) if learned else torch.ones_like(m0)
        theta = theta - lr * d * gradient + torch.sqrt(2 * lr * d * temperature / n) * noise
        c = lr * d * temperature * torch.exp(-log_variance) / n
        theta = (theta + c * m0) / (1 + c)
        iterates.append(theta)
    return iterates


def diagonal_slope(outputs, leaf):
    (slope,) = torch.autograd.grad(outputs.sum(), leaf, retain_graph=True)  # weights do not mix
    return slope


@pytest.fixture
def noises(monkeypatch):
    """Every noise that a chain draws, in turn."""
    drawn, draw = [], chains.noise_like
    monkeypatch.setattr(chains, "noise_like", lambda t: drawn.append(draw(t)) or drawn[-1])
    return drawn


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("prior_in_chain", [False, True])
def test_the_lag_gives_autograds_derivative_in_log_v0(noises, learned, noisy, prior_in_chain):
    lr, temperature, n, initial, shape, steps = 0.3, 0.8, 2, -0.7, (4, 3), 6
    m0, log_variance = torch.randn(shape), 0.5 * torch.randn(shape)
    prior, gradients = make_prior([m0], [log_variance], initial=initial), torch.randn(steps, *shape)
    settings = Settings(lr, temperature, noisy, learned, prior_in_chain, burn_in=2)
    chain = init([m0])
    for g in gradients:
        chain = step(chain, [g], prior, n, settings, scale=[prior.step_scale(0)] if learned else None)
    assert len(noises) == (steps if noisy else 0)

    leaf = log_variance.clone().requires_grad_()
    if prior_in_chain:
        used = noises or torch.zeros(steps, *shape)
        iterates = hand_written(leaf, m0, gradients, used, lr, temperature, n, initial, learned)
    else:  # the same without the pull
        scale = torch.exp(leaf - initial) if learned else 1.0 + 0.0 * leaf
        moves = [-lr * scale * g for g in gradients]
        for k, noise in enumerate(noises):
            moves[k] = moves[k] + torch.sqrt(2 * lr * temperature / n * scale) * noise
        iterates = [m0 + sum(moves[: k + 1]) for k in range(steps)]

    def slope(theta, lag):
        return theta - m0 - (0.0 if lag is None else lag)

    assert torch.allclose(chain.theta[0], iterates[-1], atol=1e-12)
    assert torch.allclose(slope(chain.theta[0], chain.lag[0]), diagonal_slope(iterates[-1], leaf), atol=1e-12)
    mean, moments = torch.stack(iterates[2:]).mean(0), chain.moments
    assert torch.allclose(moments.mean[0], mean, atol=1e-12)
    assert torch.allclose(slope(moments.mean[0], moments.lag[0]), diagonal_slope(mean, leaf), atol=1e-12)


@pytest.mark.parametrize("learned", [False, True])
def test_a_kept_step_has_the_same_derivatives_by_its_graph(noises, learned):
    shape = (3, 2)
    m0, log_variance = torch.randn(shape).requires_grad_(), (0.5 * torch.randn(shape)).requires_grad_()
    prior, gradients = make_prior([m0], [log_variance], initial=0.2), torch.randn(4, *shape)
    chain = init([m0])
    for g in gradients:
        scale = [prior.step_scale(0).detach()] if learned else None
        chain = step(chain, [g], prior, 2, Settings(0.3, 0.8, True, learned, True), kept=[0], scale=scale)
    expected = hand_written(log_variance, m0, gradients, noises, 0.3, 0.8, 2, 0.2, learned)[-1]
    upstream = torch.randn(shape)
    got, wanted = (torch.autograd.grad(t, (m0, log_variance), upstream) for t in (chain.theta[0], expected))
    assert torch.allclose(chain.theta[0], expected, atol=1e-12)
    for g, w in zip(got, wanted):
        assert torch.allclose(g, w, atol=1e-12)


def test_a_restarted_chain_goes_on_with_the_same_moments_and_moves_with_its_new_start():
    m0 = torch.randn(5)
    prior, settings = make_prior([m0], [torch.zeros(5)]), Settings(0.3, 0.8, True, True, burn_in=0)
    chain = init([m0])
    for _ in range(3):
        chain = step(chain, [torch.randn(5)], prior, 2, settings, scale=[torch.ones(5)])
    start = chain.theta[0].clone()
    again = restarted(chain, [start])
    assert again.theta[0] is start
    assert again.lag == [None]
    assert torch.equal(mean_of(again)[0], mean_of(chain)[0])
    assert torch.equal(iterate_variance(again, 0, None), iterate_variance(chain, 0, None))
    # what the mean changes with log V_0, less what the new start does
    before = chain.theta[0] - m0 - chain.lag[0]
    mean_slope = chain.moments.mean[0] - m0 - chain.moments.lag[0]
    assert torch.allclose(again.moments.mean[0] - start - again.moments.lag[0], mean_slope - before, atol=1e-12)


def test_states_are_never_written_to():
    m0 = torch.randn(BLOCK + 7)
    prior = make_prior([m0], [torch.zeros_like(m0)])
    for learned in (False, True):
        settings, scale = Settings(0.3, 0.8, True, learned, True, burn_in=0), [torch.ones_like(m0)] if learned else None
        chain, states = init([m0]), []
        for _ in range(3):
            chain = step(chain, [torch.randn_like(m0)], prior, 2, settings, scale=scale)
            moments = chain.moments
            tensors = [chain.theta[0], chain.lag[0], moments.mean[0], moments.lag[0], moments.squares[0]]
            states.append((tensors, [t.clone() for t in tensors]))
        assert all(torch.equal(a, b) for now, then in states for a, b in zip(now, then))


# noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (2047,), (2048,), (3, 683), (200, 1001)])
def test_noise_is_standardised_and_independent(dtype, shape):
    tensor = torch.zeros(shape, dtype=dtype)
    draws = torch.stack([noise_like(tensor) for _ in range(max(1, 400_000 // tensor.numel()))])
    assert draws.dtype == dtype
    assert draws.shape[1:] == shape
    x = draws.flatten(1).double()
    size = x.numel()
    assert abs(x.mean()) < 5 / size**0.5
    assert abs(x.var() - 1) < 5 * (2 / size) ** 0.5
    for distance in (1, 2, 8):  # eight values come of one random word
        if x.shape[1] > distance:
            pairs = x[:, distance:] * x[:, :-distance]
            assert abs(pairs.mean()) < 5 / pairs.numel() ** 0.5
    if len(x) > 1:
        pairs = x[1:] * x[:-1]
        assert abs(pairs.mean()) < 5 / pairs.numel() ** 0.5


@pytest.mark.parametrize("size", [5, 5000])
def test_noise_is_repeatable_with_a_seed(size):
    def draw(seed):
        torch.manual_seed(seed)
        return noise_like(torch.zeros(size))

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


# blocks


def columns(learned, lagged, pulls):
    """A large tensor, one whose gradient is not contiguous, one that is not itself, and a small one."""
    shapes = [(BLOCK + 13,), (300, 500), (500, 300), (4, 5)]
    theta = [torch.randn(s) for s in shapes]
    theta[2] = torch.randn(300, 500).T
    gradient = [torch.randn(s) for s in shapes]
    gradient[1] = torch.randn(500, 300).T
    m0 = [torch.randn(s) for s in shapes]
    scale = [torch.rand(s) + 0.5 for s in shapes] if learned else None
    lag = [torch.randn(s) for s in shapes] if lagged else None
    pull = [torch.rand(s) for s in shapes] if pulls == "list" else pulls
    return theta, gradient, m0, scale, lag, pull


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("pulls", [0.0, 0.2, "list"])
@torch.no_grad()
def test_blocks_are_the_whole_step(learned, lagged, pulls):
    *own, lag, pull = columns(learned, lagged, pulls)
    copies = [None if lag is None else [t.clone() for t in lag] for _ in range(2)]
    expected, lags = langevin_step(*own, copies[0], pull, 0.1, 0.0)
    got, found = in_blocks(*own, copies[1], pull, 0.1, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert (found is None) == (lags is None)
    if lags is not None:
        assert all(torch.equal(a, b) for a, b in zip(found, lags))


@pytest.mark.parametrize("pulls", [0.0, 0.2])
@torch.no_grad()
def test_blocks_noise_is_the_lags_noise(pulls):
    theta, gradient, m0, scale, lag, pull = columns(True, True, pulls)
    clean, _ = langevin_step(theta, gradient, m0, scale, [t.clone() for t in lag], pull, 0.1, 0.0)
    got, found = in_blocks(theta, gradient, m0, scale, lag, pull, 0.1, 0.3)
    for a, b, new, old, d in zip(got, clean, found, lag, scale):
        noise = (a - b) / (1 - pull)
        assert torch.allclose(new, (1 - pull) * (old + 0.5 * noise), atol=1e-12)
        assert (noise / (0.3 * d.sqrt())).square().mean() == pytest.approx(1.0, abs=5 * (2 / a.numel()) ** 0.5)


@torch.no_grad()
def test_several_episodes_step_from_one_m0():
    theta, gradient = [torch.randn(3, 40_000)], [torch.randn(3, 40_000)]
    m0, pull = [torch.randn(40_000)], [torch.rand(40_000)]
    got, _ = in_blocks(theta, gradient, m0, None, None, pull, 0.1, 0.0)
    for i in range(3):
        (one,), _ = langevin_step([theta[0][i]], [gradient[0][i]], m0, None, None, pull, 0.1, 0.0)
        assert torch.equal(got[0][i], one)
