"""The covariance S = (I + W^T W)^-1 in either size, its KL, and Jacobians, beside dense matrices and autograd."""

import pytest
import scipy.stats
import torch
from torch.distributions import MultivariateNormal, kl_divergence
from torch.nn import functional as F

from l2l_niw.inference.laplace import expected_kl, gauss_newton, jacobian, log_evidence, one_hots, spread
from l2l_niw.inference.wishart import WISHARTS

SIZES = [(7, 4), (4, 7), (5, 5), (1, 6), (6, 1)]  # outputs, coordinates


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def dense(w):
    return torch.linalg.inv(torch.eye(w.shape[-1]) + w.mT @ w)


def close(found, expected, tolerance=1e-10):
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("size", SIZES)
def test_a_spread_is_the_dense_inverse(size, lead):
    w = 2.0 * torch.randn(*lead, *size)
    found, s = spread(w), dense(w)
    vectors, rows = torch.randn(*lead, size[1], 2), torch.randn(*lead, 3, size[1])
    assert close(found.covariance(), s)
    assert close(found.times(vectors), s @ vectors)
    assert close(found.trace(), s.diagonal(dim1=-2, dim2=-1).sum(-1))
    assert close(found.log_determinant(), torch.linalg.slogdet(s)[1])
    assert close(found.variances(rows), (rows @ s @ rows.mT).diagonal(dim1=-2, dim2=-1))


def test_a_spread_without_outputs_is_the_prior():
    found = spread(torch.zeros(2, 0, 3))
    assert close(found.covariance(), torch.eye(3).expand(2, 3, 3))
    assert close(found.trace(), torch.tensor([3.0, 3.0]))
    assert close(found.log_determinant(), torch.zeros(2))
    assert found.draw().shape == (2, 3)


@pytest.mark.parametrize("size", [(6, 3), (2, 3)])
def test_draws_have_the_covariance(size):
    w = torch.randn(size)
    draws = spread(w.expand(200_000, *size)).draw()
    s = dense(w)
    error = (s.square() + s.diagonal().outer(s.diagonal())).sqrt() / len(draws) ** 0.5
    assert ((draws.mT @ draws / len(draws) - s).abs() < 5 * error).all()
    assert (draws.mean(0).abs() < 5 * (s.diagonal() / len(draws)).sqrt()).all()


@pytest.mark.parametrize("size", [(6, 3), (2, 3)])
def test_a_draw_is_differentiable_in_w(size):
    def drawn(w):
        torch.manual_seed(1)
        return spread(w).draw()

    assert torch.autograd.gradcheck(drawn, (torch.randn(size, requires_grad=True),))


@pytest.mark.parametrize("size", [(6, 3), (2, 3)])
def test_with_many_degrees_the_kl_is_that_of_two_gaussians(size):
    w, z = torch.randn(size), torch.randn(3)
    exact = kl_divergence(MultivariateNormal(z, dense(w)), MultivariateNormal(torch.zeros(3), torch.eye(3)))
    for wishart in WISHARTS:
        assert close(expected_kl(z, spread(w), torch.tensor(1e15), wishart), exact)


@pytest.mark.parametrize("wishart", WISHARTS)
@pytest.mark.parametrize("size", [(6, 3), (2, 3)])
def test_the_expected_kl_is_monte_carlo_s_over_the_wishart(size, wishart):
    w, z, n0 = torch.randn(size), torch.randn(3), 9.0
    if wishart == "full":  # V_0 = n_0 I, as z is in the prior's own coordinates
        sigmas = scipy.stats.invwishart(df=n0, scale=n0 * torch.eye(3).numpy()).rvs(100_000, random_state=1)
        sigmas = torch.from_numpy(sigmas)
    else:
        sigmas = torch.diag_embed(1.0 / torch.distributions.Gamma(n0 / 2, n0 / 2).sample((100_000, 3)))
    kls = kl_divergence(MultivariateNormal(z, dense(w)), MultivariateNormal(torch.zeros(3), sigmas))
    found = expected_kl(z, spread(w), torch.tensor(n0), wishart)
    assert abs(kls.mean() - found) < 4 * kls.std() / len(kls) ** 0.5


def test_the_kl_of_several_episodes_is_the_sum():
    w, z, n0 = torch.randn(3, 2, 4), torch.randn(3, 4), torch.tensor(7.0)
    each = [expected_kl(z[i], spread(w[i]), n0, "full") for i in range(3)]
    assert close(expected_kl(z, spread(w), n0, "full"), sum(each))


@pytest.mark.parametrize("size", [(6, 3), (2, 3)])
def test_one_step_on_a_quadratic_is_exact(size):
    """l(z) = |W z - y|^2 / 2, whose evidence N(y; 0, I + W W^T) lacks its constant here."""
    w, y, z = torch.randn(size), torch.randn(size[0]), torch.randn(3)
    found = spread(w)
    step = gauss_newton(z, w.mT @ (w @ z - y), found, radius=100.0)
    assert close(step, torch.linalg.solve(torch.eye(3) + w.mT @ w, w.mT @ y))
    exact = MultivariateNormal(torch.zeros(size[0]), torch.eye(size[0]) + w @ w.mT).log_prob(y)
    constant = 0.5 * size[0] * torch.log(torch.tensor(2.0 * torch.pi))
    assert close(log_evidence(0.5 * (w @ step - y).square().sum() + constant, step, found), exact)


def test_a_step_is_no_longer_than_the_radius():
    z, gradient, found = torch.randn(4, 3), 100.0 * torch.randn(4, 3), spread(torch.zeros(4, 1, 3))
    step = gauss_newton(z, gradient, found, radius=0.7)
    assert close((step - z).norm(dim=-1), torch.full((4,), 0.7))
    whole = gauss_newton(z, gradient, found, radius=1e6)
    assert close(torch.cosine_similarity(step - z, whole - z), torch.ones(4))


def outputs_of(z, weights):
    return torch.tanh(weights @ z).square() + (weights @ z).sin()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("size", [(2, 5), (10, 5), (11, 5), (30, 2)])  # by outputs up to twice the coordinates
def test_a_jacobian_is_that_of_autograd(size, create_graph):
    weights, z = torch.randn(size), torch.randn(size[1], requires_grad=True)
    found = jacobian(outputs_of(z, weights), z, create_graph)
    assert close(found, torch.func.jacrev(outputs_of)(z.detach(), weights))
    assert found.requires_grad == create_graph


@pytest.mark.parametrize("size", [(2, 5), (30, 2)])
def test_a_jacobian_s_own_gradient(size):
    weights = torch.randn(size)

    def of(z):
        return jacobian(outputs_of(z, weights), z, create_graph=True)

    assert torch.autograd.gradcheck(of, (torch.randn(size[1], requires_grad=True),))


@pytest.mark.parametrize("size", [(2, 5), (30, 2)])
def test_jacobians_of_several_episodes(size):
    weights, z = torch.randn(3, *size), torch.randn(3, size[1], requires_grad=True)
    outputs = torch.stack([outputs_of(own, w) for own, w in zip(z, weights)])
    found = jacobian(outputs, z, create_graph=False)
    for i in range(3):
        assert close(found[i], torch.func.jacrev(outputs_of)(z[i].detach(), weights[i]))


def test_one_hots_are_unit_vectors():
    found = one_hots(torch.zeros(2, 3))
    assert found.shape == (3, 2, 3)
    assert torch.equal(found[:, 1], torch.eye(3))


def test_a_jacobian_of_what_cannot_be_batched_is_computed_in_turn():
    """The gradient of max-pooling in channels-last order has no batched gradient of its own."""
    z = torch.randn(3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(9, 3, 4, 4, dtype=torch.float64).clone(memory_format=torch.channels_last)

    def outputs(z):
        return F.max_pool2d(F.conv2d(x, z.view(1, 3, 1, 1)), 2).flatten(1).sum(1)

    found, zeros = outputs(z), torch.zeros(9, dtype=torch.float64, requires_grad=True)
    pulled = torch.autograd.grad(found, z, zeros, create_graph=True)[0]
    with pytest.raises(RuntimeError):
        torch.autograd.grad(pulled, zeros, one_hots(pulled), is_grads_batched=True, retain_graph=True)
    expected = torch.stack([torch.autograd.grad(f, z, retain_graph=True)[0] for f in found])
    assert torch.allclose(jacobian(found, z, True), expected, atol=1e-12)
