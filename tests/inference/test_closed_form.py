import pytest
import scipy.optimize
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2l_niw.inference.closed_form import adapted_share, draw, episode_posterior

D = 4


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def l0_and_chain():
    """m_0, P_0 = n_0 / V_0, the chain's mean and its precision."""
    return torch.randn(D), torch.exp(1.0 - 0.5 * torch.randn(D)), torch.randn(D), torch.rand(D) * 5 + 0.1


def test_closed_form_equals_a_numerical_minimiser_of_eq_11():
    m0, p0, m_bar, a = l0_and_chain()
    n0 = 2.5
    v0 = n0 / p0

    def eq_11(z):
        m, v = torch.from_numpy(z[:D]), torch.from_numpy(z[D:]).exp()
        expected_loss = 0.5 * (a * ((m - m_bar).square() + v)).sum()
        prior = 0.5 * n0 * ((m - m0).square() / v0).sum() + 0.5 * n0 * (v / v0).sum()
        return (expected_loss - 0.5 * v.log().sum() + prior).item()

    best = scipy.optimize.minimize(eq_11, torch.zeros(2 * D).numpy(), method="BFGS", options={"gtol": 1e-10})
    mean, variance = episode_posterior(m0, p0, m_bar, a)
    assert torch.allclose(mean, torch.from_numpy(best.x[:D]), atol=1e-5)
    assert torch.allclose(variance.log(), torch.from_numpy(best.x[D:]), atol=1e-5)


def test_a_draw_has_the_posteriors_mean_and_variance():
    m0, p0, m_bar, a = l0_and_chain()
    mean, variance = episode_posterior(m0, p0, m_bar, a)
    draws = draw(m0, p0, m_bar, a, torch.randn(200_000, D) / a.sqrt())
    assert torch.allclose(draws.mean(0), mean, atol=0.01)
    assert torch.allclose(draws.var(0), variance, rtol=0.02)


def test_under_a_flat_prior_a_draw_is_the_chains_state():
    m0, _, m_bar, a = l0_and_chain()
    theta = torch.randn(D)
    assert torch.allclose(draw(m0, torch.full((D,), 1e-17), m_bar, a, theta - m_bar), theta)


positive = st.floats(1e-3, 1e3)
real = st.floats(-10, 10)


@given(m0=real, m_bar=real, p0=positive)
def test_without_curvature_the_posterior_is_the_prior(m0, m_bar, p0):
    m0, m_bar, p0 = map(torch.tensor, (m0, m_bar, p0))
    mean, variance = episode_posterior(m0, p0, m_bar, torch.tensor(1e-14))
    assert torch.allclose(mean, m0, atol=1e-8)
    assert torch.allclose(variance, 1 / p0, rtol=1e-8)


@given(m0=real, m_bar=real, p0=positive)
def test_with_infinite_curvature_the_posterior_is_the_chains_mean(m0, m_bar, p0):
    m0, m_bar, p0 = map(torch.tensor, (m0, m_bar, p0))
    mean, variance = episode_posterior(m0, p0, m_bar, torch.tensor(1e16))
    assert torch.allclose(mean, m_bar, atol=1e-8)
    assert variance < 1e-15
    exact, none = episode_posterior(m0, p0, m_bar, torch.tensor(float("inf")))
    assert torch.allclose(exact, m_bar)
    assert none == 0


@given(m0=real, m_bar=real, p0=positive, a=positive)
def test_the_posterior_lies_between_and_is_surer_than_either(m0, m_bar, p0, a):
    m0, m_bar, p0, a = map(torch.tensor, (m0, m_bar, p0, a))
    mean, variance = episode_posterior(m0, p0, m_bar, a)
    assert min(m0, m_bar) - 1e-9 <= mean <= max(m0, m_bar) + 1e-9
    assert variance <= min(1 / a, 1 / p0) * (1 + 1e-12)
    assert torch.allclose(adapted_share(a, p0), a / (a + p0))
