import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2l_niw.closed_form import adapted_share, draw, episode_posterior, expected_kl
from l2l_niw.wishart import WISHARTS

D = 4


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def log_variance(log_v0, n0):
    return log_v0 - torch.log(n0)


def l0_and_chain(d=D, wishart="full"):
    m0, m_bar = torch.randn(d), torch.randn(d)
    log_v0, a = 0.5 * torch.randn(d), torch.rand(d) * 5 + 0.1
    n0 = torch.tensor(d + 2.5 if wishart == "full" else 2.5)
    return m0, log_v0, n0, m_bar, a


def test_closed_form_equals_a_numerical_minimiser_of_eq_11():
    m0, log_v0, n0, m_bar, a = l0_and_chain()

    def eq_11(z):
        m, v = torch.from_numpy(z[:D]), torch.from_numpy(z[D:]).exp()
        expected_loss = 0.5 * (a * ((m - m_bar).square() + v)).sum()
        prior = 0.5 * n0 * ((m - m0).square() / log_v0.exp()).sum() + 0.5 * n0 * (v / log_v0.exp()).sum()
        return (expected_loss - 0.5 * v.log().sum() + prior).item()

    best = scipy.optimize.minimize(eq_11, torch.zeros(2 * D).numpy(), method="BFGS", options={"gtol": 1e-10})
    mean, variance = episode_posterior(m0, log_variance(log_v0, n0), m_bar, a)
    assert torch.allclose(mean, torch.from_numpy(best.x[:D]), atol=1e-5)
    assert torch.allclose(variance.log(), torch.from_numpy(best.x[D:]), atol=1e-5)


def gaussian_kl(mean, variance, mu, sigma):
    """KL(N(mean, diag variance) || N(mu, sigma)) for a full matrix sigma."""
    p = torch.distributions.MultivariateNormal(mu, sigma)
    q = torch.distributions.MultivariateNormal(mean, torch.diag(variance))
    return torch.distributions.kl_divergence(q, p)


def test_expected_kl_equals_monte_carlo_over_a_full_wishart():
    m0, log_v0, n0, mean, _ = l0_and_chain()
    variance = torch.rand(D) + 0.1
    sigmas = scipy.stats.invwishart(df=n0.item(), scale=torch.diag(log_v0.exp()).numpy()).rvs(40_000, random_state=1)
    kls = gaussian_kl(mean, variance, m0, torch.from_numpy(sigmas))
    exact = expected_kl(mean, variance, m0, log_variance(log_v0, n0), n0, "full")
    assert abs(kls.mean() - exact) < 4 * kls.std() / len(kls) ** 0.5


def test_expected_kl_equals_monte_carlo_over_factorised_wisharts():
    m0, log_v0, n0, mean, _ = l0_and_chain(wishart="factorised")
    variance = torch.rand(D) + 0.1
    gamma = torch.distributions.Gamma(n0 / 2, log_v0.exp() / 2)  # the inverse of IW(v0, n0) in one dimension
    sigmas = 1.0 / gamma.sample((40_000,))
    kls = gaussian_kl(mean, variance, m0, torch.diag_embed(sigmas))
    exact = expected_kl(mean, variance, m0, log_variance(log_v0, n0), n0, "factorised")
    assert abs(kls.mean() - exact) < 4 * kls.std() / len(kls) ** 0.5


@pytest.mark.parametrize("wishart", WISHARTS)
def test_expected_kl_equals_the_papers_printed_formula(wishart):
    m0, log_v0, n0, mean, variance = l0_and_chain(wishart=wishart)
    j = torch.arange(1, D + 1)
    psi = torch.digamma(n0 / 2 + (1 - j) / 2).sum() if wishart == "full" else D * torch.digamma(n0 / 2)
    v0 = log_v0.exp()
    printed = 0.5 * (
        -D * torch.log(torch.tensor(2 * torch.e)) + (v0.log() - variance.log()).sum() - psi
        + n0 * ((mean - m0).square() / v0).sum() + n0 * (variance / v0).sum()
    )
    assert torch.allclose(expected_kl(mean, variance, m0, log_variance(log_v0, n0), n0, wishart), printed, atol=1e-12)


@pytest.mark.parametrize("wishart", WISHARTS)
def test_gradients_of_f_plus_half_g_by_gradcheck(wishart):
    m0, log_v0, n0, m_bar, a = l0_and_chain(wishart=wishart)
    target, offset = torch.randn(D), torch.randn(D) / a.sqrt()

    def objective(m0, log_v0, n0):
        spread = log_variance(log_v0, n0)
        f = (draw(m0, spread, m_bar, a, offset) - target).pow(4).sum()
        return f + expected_kl(*episode_posterior(m0, spread, m_bar, a), m0, spread, n0, wishart)

    assert torch.autograd.gradcheck(objective, tuple(t.requires_grad_() for t in (m0, log_v0, n0)))


def test_a_draw_has_the_posteriors_mean_and_variance():
    m0, log_v0, n0, m_bar, a = l0_and_chain()
    spread = log_variance(log_v0, n0)
    mean, variance = episode_posterior(m0, spread, m_bar, a)
    draws = draw(m0, spread, m_bar, a, torch.randn(200_000, D) / a.sqrt())
    assert torch.allclose(draws.mean(0), mean, atol=0.01)
    assert torch.allclose(draws.var(0), variance, rtol=0.02)


positive = st.floats(1e-3, 1e3)
real = st.floats(-10, 10)


@given(m0=real, m_bar=real, p0=positive)
def test_without_curvature_the_posterior_is_the_prior(m0, m_bar, p0):
    m0, m_bar, p0 = map(torch.tensor, (m0, m_bar, p0))
    mean, variance = episode_posterior(m0, -p0.log(), m_bar, torch.tensor(1e-14))
    assert torch.allclose(mean, m0, atol=1e-8)
    assert torch.allclose(variance, 1 / p0, rtol=1e-8)


@given(m0=real, m_bar=real, p0=positive)
def test_with_infinite_curvature_the_posterior_is_the_chains_mean(m0, m_bar, p0):
    m0, m_bar, p0 = map(torch.tensor, (m0, m_bar, p0))
    mean, variance = episode_posterior(m0, -p0.log(), m_bar, torch.tensor(1e16))
    assert torch.allclose(mean, m_bar, atol=1e-8)
    assert variance < 1e-15
    exact, none = episode_posterior(m0, -p0.log(), m_bar, torch.tensor(float("inf")))
    assert torch.allclose(exact, m_bar)
    assert none == 0


@given(m0=real, m_bar=real, p0=positive, a=positive)
def test_the_posterior_lies_between_and_is_surer_than_either(m0, m_bar, p0, a):
    m0, m_bar, p0, a = map(torch.tensor, (m0, m_bar, p0, a))
    mean, variance = episode_posterior(m0, -p0.log(), m_bar, a)
    assert min(m0, m_bar) - 1e-9 <= mean <= max(m0, m_bar) + 1e-9
    assert variance <= min(1 / a, 1 / p0)
    assert 0 <= adapted_share(a, p0) <= 1


@given(m=real, v=positive, m0=real, v0=positive, n0=positive)
def test_the_factorised_kl_is_never_negative(m, v, m0, v0, n0):
    m, v, m0, v0, n0 = (torch.tensor([x]) for x in (m, v, m0, v0, n0))
    assert expected_kl(m, v, m0, n0 / v0, n0, "factorised") >= 0
