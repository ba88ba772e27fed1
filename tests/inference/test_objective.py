"""The expected KL, the objective, and how both reach L_0."""

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from prior_cases import leaves_of, make_prior, with_leaves

from l2l_niw.inference import objective as objectives
from l2l_niw.inference.closed_form import draw, episode_posterior
from l2l_niw.inference.objective import (
    Follow,
    ForwardTag,
    KLGradient,
    Released,
    Tag,
    constant_kl_gradient,
    expected_kl,
    kl_gradient,
    objective,
)
from l2l_niw.inference.wishart import WISHARTS, gap_slope

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
    m0, log_variance, mean, variance = (torch.cat([t.flatten() for t in own]) for own in (*prior[1:3], *q))
    d, n0 = len(m0), prior.n0
    j = torch.arange(1, d + 1)
    psi = torch.digamma(n0 / 2 + (1 - j) / 2).sum() if wishart == "full" else d * torch.digamma(n0 / 2)
    v0 = n0 * log_variance.exp()
    constant = -d * torch.log(torch.tensor(2 * torch.e)) - psi
    quadratic = n0 * ((mean - m0).square() / v0).sum() + n0 * (variance / v0).sum()
    printed = 0.5 * (constant + (v0.log() - variance.log()).sum() + quadratic)
    assert torch.allclose(expected_kl(q, prior), printed, atol=1e-12)


def test_the_kl_of_several_episodes_is_the_sum():
    prior, _ = l0_and_q("full", SHAPES)
    q = [torch.randn(3, *s) for s in SHAPES], [torch.rand(3, *s) + 0.1 for s in SHAPES]
    each = [expected_kl(([m[i] for m in q[0]], [v[i] for v in q[1]]), prior) for i in range(3)]
    assert torch.allclose(expected_kl(q, prior), sum(each))


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
        (m0,), (log_variance,) = own.m0, own.log_variance
        f = (draw(m0, log_variance, m_bar, a, deviation) - target).pow(4).sum()
        q = episode_posterior(m0, log_variance, m_bar, a)
        return objective(f, expected_kl(([q[0]], [q[1]]), own), 0.7, 3)

    assert torch.autograd.gradcheck(total, tuple(t.requires_grad_() for t in leaves_of(prior)))


def test_the_objective_is_in_units_of_the_mean_loss():
    assert objective(torch.tensor(2.0), torch.tensor(6.0), 0.5, 4).item() == 2.75


# the KL's gradient, computed when a loss is back-propagated


def q_of(prior, moving, q):
    """q_i as a function of L_0: constant, or the closed form's."""
    if not moving:
        return q
    columns = zip(prior.m0, prior.log_variance, *q)
    pairs = [episode_posterior(m0, log_variance, m, 1 / v) for m0, log_variance, m, v in columns]
    return [m for m, _ in pairs], [v for _, v in pairs]


@pytest.mark.parametrize("wishart", WISHARTS)
def test_the_hand_written_gradient_is_autograds(wishart):
    prior, q = l0_and_q(wishart, SHAPES)
    leaves = [t.requires_grad_() for t in leaves_of(prior)]
    expected = torch.autograd.grad(0.3 * expected_kl(q, prior), leaves)
    in_m0, in_variance = constant_kl_gradient(*q, prior.m0, prior.log_variance, 0.3)
    in_n0 = torch.tensor(0.5 * 0.3 * gap_slope(prior.raw_n0.item(), prior.d, wishart))
    for found in ([*in_m0, *in_variance, in_n0], kl_gradient(q, q[0], prior, 0.3, create_graph=False)):
        assert len(found) in (len(expected), len(expected) + len(q[0]))
        for got, e in zip(found, expected):
            assert torch.allclose(got, e, atol=1e-13)


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("small", [True, False])
def test_the_kls_gradient_arrives_with_n(monkeypatch, wishart, moving, small):
    if not small:
        monkeypatch.setattr(objectives, "SMALL", 0)
    prior, q = l0_and_q(wishart, SHAPES)
    leaves = [t.requires_grad_() for t in leaves_of(prior)]
    state, means = Released(lambda own, mean: q_of(own, moving, (mean, q[1]))), [t.requires_grad_() for t in q[0]]
    carrier = KLGradient.apply(state, prior, 0.3, *leaves, *means)
    assert carrier.item() == 0
    got = torch.autograd.grad(carrier, [*leaves, *means], torch.tensor(7.0))
    expected = torch.autograd.grad(0.3 / 7 * expected_kl(q_of(prior, moving, q), prior), [*leaves, *means])
    for g, e in zip(got, expected):
        assert torch.allclose(g, e, atol=1e-13)


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("small", [True, False])
def test_the_kls_gradient_can_be_differentiated_again(monkeypatch, moving, small):
    if not small:
        monkeypatch.setattr(objectives, "SMALL", 0)
    prior, q = l0_and_q("full", SHAPES)
    leaves = [t.requires_grad_() for t in leaves_of(prior)]
    leaves += [t.requires_grad_() for t in q[0]]
    state = Released(lambda own, mean: q_of(own, moving, (mean, q[1])))
    direction = [torch.randn_like(t) for t in leaves]

    def hessian_vector_product(gradients):
        product = sum((g * v).sum() for g, v in zip(gradients, direction))
        return torch.autograd.grad(product, leaves)

    carrier = KLGradient.apply(state, prior, 0.3, *leaves)
    got = hessian_vector_product(torch.autograd.grad(carrier, leaves, torch.tensor(7.0), create_graph=True))
    value = 0.3 / 7 * expected_kl(q_of(prior, moving, q), prior)
    expected = hessian_vector_product(torch.autograd.grad(value, leaves, create_graph=True))
    for g, e in zip(got, expected):
        assert torch.allclose(g, e, atol=1e-12)


def test_without_a_kl_every_parameter_has_a_gradient_of_zero():
    prior, _ = l0_and_q("factorised", SHAPES)
    leaves = [t.requires_grad_() for t in leaves_of(prior)]
    KLGradient.apply(Released(), prior, 0.0, *leaves).backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in leaves)


def test_the_number_of_examples_is_the_sum_over_the_forwards_behind_a_loss():
    carrier, weight = torch.zeros((), requires_grad=True), torch.randn(3, requires_grad=True)
    found, views = [], []
    for n in (5, 7, 100):
        tag = ForwardTag(found)
        tag.n = n
        views.append(Tag.apply(tag, carrier, weight)[0])
    (views[0].square().sum() + views[1].sum()).backward()  # the third forward has no part in it
    assert carrier.grad == 12
    assert sorted(tag.n for tag in found) == [5, 7]
    assert torch.allclose(weight.grad, 2 * weight.detach() + 1)


def test_a_forward_that_a_step_was_taken_on_does_not_count():
    carrier, weight = torch.zeros((), requires_grad=True), torch.randn(3, requires_grad=True)
    tag = ForwardTag([])
    tag.stepped_on = True
    (view,) = Tag.apply(tag, carrier, weight)
    view.sum().backward()
    assert carrier.grad is None


# iterates as functions of where they began, and of V_0


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("lagged", [True, False])
def test_iterates_follow_their_starts_and_v0(monkeypatch, small, lagged):
    if not small:
        monkeypatch.setattr(objectives, "SMALL", 0)
    theta, start, log_variance = ([torch.randn(s) for s in SHAPES] for _ in range(3))
    lag = [torch.randn(s) if lagged else None for s in SHAPES]
    leaves = [t.requires_grad_() for t in (*start, *log_variance)]
    state = Released(theta, [t.detach() for t in start], lag)
    iterates = Follow.apply([t.clone() for t in theta], state, *leaves)
    assert all(torch.equal(a, b) for a, b in zip(iterates, theta))
    upstream = [torch.randn(s) for s in SHAPES[:2]]  # the third has no part in the loss
    found = torch.autograd.grad(iterates[:2], leaves, upstream, allow_unused=True)
    for i, gradient in enumerate(upstream):
        slope = theta[i] - start[i].detach() - (lag[i] if lagged else 0.0)
        assert torch.equal(found[i], gradient)
        assert torch.allclose(found[len(SHAPES) + i], gradient * slope)
    assert found[2] is found[5] is None


def test_iterates_whose_steps_have_no_part_of_v0_follow_their_starts_alone():
    theta, start, log_variance = (torch.randn(4) for _ in range(3))
    leaves = start.requires_grad_(), log_variance.requires_grad_()
    (iterate,) = Follow.apply([theta.clone()], Released(), *leaves)
    found = torch.autograd.grad(iterate.sum(), leaves, allow_unused=True)
    assert torch.equal(found[0], torch.ones(4))
    assert found[1] is None


def test_following_is_linear_and_can_be_differentiated_again():
    theta, start, log_variance = torch.randn(3), torch.randn(3), torch.randn(3)
    leaves = [start.requires_grad_(), log_variance.requires_grad_()]
    slope = theta - start.detach()

    def values(follow):
        if follow:
            return Follow.apply([theta.clone()], Released([theta], [start.detach()], [None]), *leaves)[0]
        return theta + (start - start.detach()) + slope * (log_variance - log_variance.detach())

    products = []
    for follow in (True, False):
        gradients = torch.autograd.grad(values(follow).pow(3).sum(), leaves, create_graph=True)
        products.append(torch.autograd.grad(sum(g.sin().sum() for g in gradients), leaves))
    for g, e in zip(*products):
        assert torch.allclose(g, e)


def test_a_released_state_holds_nothing():
    state = Released([torch.randn(2)], [torch.randn(2)], [None])
    state.release()
    assert state.held is None
