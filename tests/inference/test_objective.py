"""The expected KL and the objective."""

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from prior_cases import leaves_of, make_prior, with_leaves

from l2l_niw.inference.closed_form import draw, episode_posterior
from l2l_niw.inference.objective import expected_kl, objective
from l2l_niw.inference.wishart import WISHARTS

D, SHAPES = 4, [(2, 3), (4,), ()]


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def l0_and_q(wishart, shapes=((D,),)):
    """L_0, and means and variances of q_i."""
    prior = make_prior([torch.randn(s) for s in shapes], [0.5 * torch.randn(s) - 1 for s in shapes], wishart=wishart)
    return prior, ([torch.randn(s) for s in shapes], [torch.rand(s) + 0.1 for s in shapes])


def gaussian_kl(mean, variance, mu, sigma):
    """KL(N(mean, diag variance) || N(mu, sigma)) for a full matrix sigma."""
    p = torch.distributions.MultivariateNormal(mu, sigma)
    q = torch.distributions.MultivariateNormal(mean, torch.diag(variance))
    return torch.distributions.kl_divergence(q, p)


@pytest.mark.parametrize("wishart", WISHARTS)
def test_expected_kl_equals_monte_carlo_over_the_wishart(wishart):
    prior, q = l0_and_q(wishart)
    n0, v0 = prior.n0.item(), prior.n0 * prior.log_variance[0].exp()
    if wishart == "full":
        sigmas = scipy.stats.invwishart(df=n0, scale=torch.diag(v0).numpy()).rvs(40_000, random_state=1)
        sigmas = torch.from_numpy(sigmas)
    else:  # the inverse of IW(v0, n0) in one dimension is a Gamma
        sigmas = torch.diag_embed(1.0 / torch.distributions.Gamma(n0 / 2, v0 / 2).sample((40_000,)))
    kls = gaussian_kl(q[0][0], q[1][0], prior.m0[0], sigmas)
    assert abs(kls.mean() - expected_kl(q, prior)) < 4 * kls.std() / len(kls) ** 0.5


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("shapes", [[(D,)], SHAPES])
def test_expected_kl_equals_the_papers_printed_formula(wishart, shapes):
    prior, q = l0_and_q(wishart, shapes)
    m0, log_variance, mean, variance = (
        torch.cat([t.flatten() for t in own]) for own in (prior.m0, prior.log_variance, *q)
    )
    d, n0 = len(m0), prior.n0
    j = torch.arange(1, d + 1)
    psi = torch.digamma(n0 / 2 + (1 - j) / 2).sum() if wishart == "full" else d * torch.digamma(n0 / 2)
    v0 = n0 * log_variance.exp()
    constant = -d * torch.log(torch.tensor(2 * torch.e)) - psi
    quadratic = n0 * ((mean - m0).square() / v0).sum() + n0 * (variance / v0).sum()
    printed = 0.5 * (constant + (v0.log() - variance.log()).sum() + quadratic)
    assert torch.allclose(expected_kl(q, prior), printed, atol=1e-12)


def test_the_kl_of_several_episodes_is_each_ones():
    prior, _ = l0_and_q("full", SHAPES)
    q = [torch.randn(3, *s) for s in SHAPES], [torch.rand(3, *s) + 0.1 for s in SHAPES]
    each = [expected_kl(([m[i] for m in q[0]], [v[i] for v in q[1]]), prior) for i in range(3)]
    assert torch.allclose(expected_kl(q, prior), torch.stack(each))
    shared = prior._replace(m0=[m.expand(3, *m.shape) for m in prior.m0])
    assert torch.allclose(expected_kl(q, shared), torch.stack(each))


positive, real = st.floats(1e-3, 1e3), st.floats(-10, 10)


@given(m=real, v=positive, m0=real, v0=positive, n0=positive)
def test_the_factorised_kl_is_never_negative(m, v, m0, v0, n0):
    m, v, m0, v0 = (torch.tensor([x]) for x in (m, v, m0, v0))
    assert expected_kl(([m], [v]), make_prior([m0], [v0.log()], n0)) >= 0


@pytest.mark.parametrize("wishart", WISHARTS)
def test_gradients_of_f_plus_half_g_by_gradcheck(wishart):
    prior, _ = l0_and_q(wishart)
    m_bar, a, target = torch.randn(D), torch.rand(D) * 5 + 0.1, torch.randn(D)
    deviation = torch.randn(D) / a.sqrt()

    def total(*leaves):
        own = with_leaves(prior, leaves)
        m0, p0 = own.m0[0], own.precision(0)
        f = (draw(m0, p0, m_bar, a, deviation) - target).pow(4).sum()
        q = episode_posterior(m0, p0, m_bar, a)
        return objective(f, expected_kl(([q[0]], [q[1]]), own), 0.7, 3)

    assert torch.autograd.gradcheck(total, tuple(leaves_of(prior)))


def test_the_objective_is_in_units_of_the_mean_loss():
    assert objective(torch.tensor(2.0), torch.tensor(6.0), 0.5, 4).item() == 2.75
