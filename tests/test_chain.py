import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2l_niw.chain import Chain, langevin_step, noise_variance


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def run(precision, centre, lr, temperature, n, steps, burn_in):
    """A Langevin chain on the mean loss whose n-fold is a Gaussian's negative log-density."""
    chain = Chain(torch.zeros_like(centre))
    for _ in range(steps):
        gradient = precision * (chain.theta - centre) / n
        chain = chain.append(langevin_step(chain.theta, gradient, lr, temperature, n), burn_in)
    return chain


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("n", [1, 10])
def test_long_chain_has_the_moments_of_the_tempered_likelihood(temperature, n):
    repeats = 4000  # independent copies of each coordinate, side by side in one vector
    precision = torch.tensor([0.5, 2.0, 8.0]).repeat_interleave(repeats)
    centre = torch.tensor([1.0, -2.0, 0.5]).repeat_interleave(repeats)
    lr = 0.02 * n
    chain = run(precision, centre, lr, temperature, n, steps=1500, burn_in=500)
    variance = chain.variance(noise_variance(lr, temperature, n)).view(3, repeats)
    # a step of lr makes the stationary variance of a linear chain T / (h - lr h^2 / 2n), exactly
    h = precision.view(3, repeats)[:, 0]
    stationary = temperature / (h - lr * h.square() / (2 * n))
    assert torch.allclose(chain.theta.view(3, repeats).var(1), stationary, rtol=0.08)
    # one path of 1,000 correlated steps varies less about its own mean than the law itself does
    correlation = 1 - lr * h / n
    kept = chain.kept
    lags = torch.arange(1, kept)
    loss = (1 + 2 * ((1 - lags / kept) * correlation[:, None] ** lags).sum(1)) / kept
    assert torch.allclose(variance.mean(1), stationary * (1 - loss), rtol=0.03)
    mean = chain.mean.view(3, repeats).mean(1)
    assert torch.allclose(mean, torch.tensor([1.0, -2.0, 0.5]), atol=0.02 * temperature**0.5)


def test_scaled_steps_have_the_same_stationary_law():
    repeats, precision = 8000, 2.0
    scale = torch.tensor([0.25, 1.0, 4.0]).repeat_interleave(repeats)
    theta = torch.zeros(3 * repeats)
    for _ in range(1500):
        theta = langevin_step(theta, precision * theta, 0.005, 1.0, 1, scale)
    assert torch.allclose(theta.view(3, repeats).var(1), torch.tensor(1 / precision), rtol=0.06)


def test_moments_equal_those_of_the_stored_iterates():
    iterates = torch.randn(20, 7)
    chain = Chain(torch.zeros(7))
    for theta in iterates:
        chain = chain.append(theta, burn_in=5)
    kept = iterates[5:]
    assert chain.kept == len(kept)
    assert torch.allclose(chain.mean, kept.mean(0))
    assert torch.allclose(chain.variance(0.0), kept.var(0, unbiased=False))


@given(steps=st.integers(1, 6), burn_in=st.integers(0, 8), pseudo=st.floats(1e-9, 1.0))
def test_few_samples_never_give_nan(steps, burn_in, pseudo):
    chain = Chain(torch.zeros(3))
    for _ in range(steps):
        chain = chain.append(torch.randn(3), burn_in)
    assert chain.kept == max(1, steps - burn_in)
    assert torch.isfinite(1 / chain.variance(pseudo)).all()
    if steps <= burn_in + 1:
        assert torch.equal(chain.mean, chain.theta)
        assert torch.allclose(chain.variance(pseudo), torch.full((3,), pseudo))


def test_without_temperature_a_step_is_gradient_descent():
    theta, gradient = torch.randn(5), torch.randn(5)
    assert torch.equal(langevin_step(theta, gradient, 0.1, 0.0, 3), theta - 0.1 * gradient)
