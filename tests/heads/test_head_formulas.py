"""Each head's formula against an independent answer."""

import learn2learn as l2l
import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import DotProduct, WhiteKernel
from sklearn.linear_model import Ridge as SklearnRidge
from torch import nn
from torch.nn import functional as F

from l2l_niw.errors import LossError
from l2l_niw.heads import FEAT, BayesianRidge, Linear, MetaQDA, NearestCentroid, Ridge
from l2l_niw.heads.predictions import Classes, Evidence, Gaussian, GaussianMixture

SIZES = pytest.mark.parametrize(("n", "d"), [(4, 9), (12, 3), (5, 5)])


@pytest.fixture(autouse=True)
def in_double(double):
    pass


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_nearest_centroid_is_learn2learns(distance, scale):
    support, y, query = torch.randn(11, 6), torch.tensor([3, 3, 0, 8, 8, 8, 0, 0, 3, 8, 8]), torch.randn(7, 6)
    expected = scale * l2l.nn.PrototypicalClassifier(support, y, distance=distance)(query)
    logits = NearestCentroid(distance, scale)(support, y, query).logits
    assert torch.allclose(logits, expected.log_softmax(-1), atol=1e-6 if distance == "cosine" else 1e-12)


@SIZES
@pytest.mark.parametrize("bias", [False, True])
def test_ridge_is_scikit_learns(n, d, bias):
    phi, y, query = torch.randn(n, d), torch.randn(n, 2), torch.randn(6, d)
    padded, padded_query = (F.pad(x, (0, 1), value=1.0) if bias else x for x in (phi, query))
    reference = SklearnRidge(alpha=0.7, fit_intercept=False).fit(padded.numpy(), y.numpy())
    prediction = Ridge("regression", lam=0.7, bias=bias, noise=0.5)(phi, y, query)
    assert np.allclose(prediction.mean, reference.predict(padded_query.numpy()), atol=1e-10)
    assert torch.equal(prediction.stddev, torch.full((6, 2), 0.5))


def test_ridge_classifies_by_one_hot_regression():
    phi, y, query = torch.randn(10, 4), torch.arange(10) % 3, torch.randn(6, 4)
    reference = SklearnRidge(alpha=0.2, fit_intercept=False).fit(phi.numpy(), F.one_hot(y).double().numpy())
    scores = 5.0 * torch.from_numpy(reference.predict(query.numpy()))
    logits = Ridge(lam=0.2, bias=False, scale=5.0)(phi, y + 4, query).logits
    assert torch.allclose(logits, scores.log_softmax(-1), atol=1e-10)


@SIZES
def test_bayesian_ridge_is_a_gaussian_process_with_a_linear_kernel(n, d):
    """scikit-learn's GP inverts n x n; kernel prior_scale^2 x.x' is a DotProduct on scaled inputs."""
    noise, prior_scale = 0.4, 1.7
    phi, y, query = torch.randn(n, d), torch.randn(n), torch.randn(6, d)
    kernel = DotProduct(0.0, "fixed") + WhiteKernel(noise**2, "fixed")
    gp = GaussianProcessRegressor(kernel, alpha=1e-14, optimizer=None)
    gp.fit(prior_scale * phi.numpy(), y.numpy())
    mean, std = gp.predict(prior_scale * query.numpy(), return_std=True)
    head = BayesianRidge(noise, prior_scale, bias=False)
    prediction = head(phi, y.unsqueeze(-1), query)
    assert np.allclose(prediction.mean.detach().squeeze(-1), mean, atol=1e-9)
    assert np.allclose(prediction.stddev.detach().squeeze(-1), std, atol=1e-9)
    evidence = head(phi, y.unsqueeze(-1))
    assert isinstance(evidence, Evidence)
    assert evidence.nll(y.unsqueeze(-1)).item() == pytest.approx(-gp.log_marginal_likelihood_value_ / n, abs=1e-9)


@SIZES
def test_bayesian_ridge_has_the_mean_of_ridge(n, d):
    phi, y, query = torch.randn(n, d), torch.randn(n, 2), torch.randn(6, d)
    bayesian = BayesianRidge(noise=0.4, prior_scale=1.7)(phi, y, query)
    assert torch.allclose(bayesian.mean, Ridge("regression", lam=(0.4 / 1.7) ** 2)(phi, y, query).mean, atol=1e-10)


def test_bayesian_ridges_variance_survives_float32_and_a_tiny_noise():
    phi, query = 100 * torch.randn(5, 40), 100 * torch.randn(50, 40)
    exact = BayesianRidge(noise=1e-2, prior_scale=1.0)
    single = BayesianRidge(noise=1e-2, prior_scale=1.0).float()
    y = torch.randn(5, 1)
    expected, got = exact(phi, y, query).stddev, single(phi.float(), y.float(), query.float()).stddev
    assert torch.allclose(got.double(), expected, rtol=1e-2)


@pytest.mark.parametrize(("n", "d"), [(100, 40), (20, 40)])
def test_the_evidence_survives_float32_and_a_tiny_noise(n, d):
    phi = 10 * torch.randn(n, d).relu()
    y = phi @ torch.randn(d, 1) + 0.01 * torch.randn(n, 1)
    values = []
    for dtype in (torch.float64, torch.float32):
        noise = torch.tensor(0.01, dtype=dtype, requires_grad=True)
        nll = Evidence(phi.to(dtype), noise, 1).nll(y.to(dtype))
        nll.backward()
        values.append((nll.item(), noise.grad.item()))
    assert values[1][0] == pytest.approx(values[0][0], abs=0.02)
    assert values[1][1] == pytest.approx(values[0][1], rel=0.05, abs=1.0)


def test_features_that_no_head_can_solve_for_are_an_error():
    phi = torch.full((4, 3), float("nan"))
    for head in (Ridge("regression"), BayesianRidge()):
        with pytest.raises(LossError, match="Normalise the features"):
            head(phi, torch.randn(4, 1), phi)
    with pytest.raises(LossError, match="Normalise the features"):
        BayesianRidge()(phi, torch.randn(4, 1)).nll(torch.randn(4, 1))


def test_evidence_samples_have_its_covariance():
    factor, noise = torch.randn(4, 2), torch.tensor(0.5)
    draws = Evidence(factor, noise, targets=2).sample((200_000,))
    assert draws.shape == (200_000, 4, 2)
    covariance = torch.cov(draws[..., 0].T)
    assert torch.allclose(covariance, factor @ factor.T + 0.25 * torch.eye(4), atol=0.05)


def textbook_posterior(x, m, kappa, s, nu):
    """Murphy 2012, Sec. 4.6.3.3, in numpy."""
    n, mean = len(x), x.mean(0)
    scatter = (x - mean).T @ (x - mean)
    kappa_n, nu_n = kappa + n, nu + n
    m_n = (kappa * m + n * mean) / kappa_n
    s_n = s + scatter + kappa * n / kappa_n * np.outer(mean - m, mean - m)
    return m_n, kappa_n, s_n, nu_n


@pytest.mark.parametrize("inference", ["map", "bayesian"])
def test_metaqda_is_scipys_student_t(inference):
    d = 4
    head = MetaQDA(d, inference, kappa=0.8, nu=6.5, spread=1.3)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.3 * torch.randn_like(p))
    x, y, query = torch.randn(13, d), torch.tensor([0] * 2 + [4] * 10 + [9]), torch.randn(6, d)
    lower = head.lower().detach().numpy()
    assert np.allclose(lower, np.tril(lower))
    prior = (
        head.mean.detach().numpy(),
        head.log_kappa.exp().item(),
        lower @ lower.T,
        head.log_freedom.exp().item() + d - 1,
    )
    columns = []
    for label in (0, 4, 9):
        m_n, kappa_n, s_n, nu_n = textbook_posterior(x[y == label].numpy(), *prior)
        if inference == "map":
            law = stats.multivariate_normal(m_n, s_n / (nu_n + d + 2))
        else:
            df = nu_n - d + 1
            law = stats.multivariate_t(m_n, s_n * (kappa_n + 1) / (kappa_n * df), df=df)
        columns.append(torch.from_numpy(law.logpdf(query.numpy())))
    expected = torch.stack(columns, -1).log_softmax(-1)
    assert torch.allclose(head(x, y, query).logits, expected, atol=1e-9)


def test_feats_contrastive_term_is_that_of_a_loop_over_classes():
    head = FEAT(6, heads=2, scale=0.3, contrast=0.7)
    support, y, query = torch.randn(5, 6), torch.tensor([2, 2, 5, 7, 7]), torch.randn(4, 6)
    query_y = torch.tensor([5, 7, 2, 5])
    x, labels = torch.cat([support, query]), torch.cat([y, query_y])
    centers = []
    for label in (2, 5, 7):
        members = x[labels == label]
        centers.append(head.norm(members + head.attention(members, members, members)).mean(0))
    logits = -0.3 * torch.cdist(x, torch.stack(centers)).square()
    expected = F.cross_entropy(logits, torch.bucketize(labels, torch.tensor([2, 5, 7])))
    assert head(support, y, query, query_y).penalty.item() == pytest.approx(0.7 * expected.item())
    assert head(support, y, query).penalty == 0.0


def test_feat_without_its_attention_is_a_nearest_centroid():
    head = FEAT(6, scale=0.3)
    nn.init.zeros_(head.attention.out.weight)
    nn.init.zeros_(head.attention.out.bias)
    head.norm = nn.Identity()
    support, y, query = torch.randn(5, 6), torch.tensor([0, 0, 1, 2, 2]), torch.randn(4, 6)
    expected = NearestCentroid(scale=0.3)(support, y, query).logits
    assert torch.allclose(head(support, y, query).logits, expected, atol=1e-12)


def test_feats_options():
    head = FEAT(6, dropout=0.5)
    assert head.scale().item() == pytest.approx(1 / 6)
    support, y, query = torch.randn(5, 6), torch.tensor([0, 0, 1, 2, 2]), torch.randn(4, 6)
    assert not torch.allclose(head(support, y, query).logits, head(support, y, query).logits)
    head.eval()
    assert torch.equal(head(support, y, query).logits, head(support, y, query).logits)


def test_a_linear_heads_noise_is_its_predictions():
    head = Linear(3, 2, "regression", noise=0.7)
    support, query = torch.randn(4, 3), torch.randn(5, 3)
    prediction = head(support, torch.randn(4, 2), query)
    assert torch.allclose(prediction.mean, query @ head.linear.weight.T + head.linear.bias)
    assert torch.allclose(prediction.stddev, torch.full((5, 2), 0.7))


@pytest.mark.parametrize("inference", ["map", "bayesian"])
def test_metaqda_starts_with_classes_of_about_unit_variance(inference):
    """Unit-variance classes that overlap: a prior that is far too narrow would be sure, and wrong."""
    head, d = MetaQDA(64, inference), 64
    centers = torch.randn(5, d) * 0.1
    y = torch.arange(5).repeat(5)
    support, query = centers[y] + torch.randn(25, d), centers[y] + torch.randn(25, d)
    assert head(support, y, query).nll(y) < 10.0


def test_a_mixture_of_unequal_ways_has_gradients():
    head, x = NearestCentroid(), torch.randn(2, 4, 3, requires_grad=True)
    y = torch.tensor([[0, 1, 2, 0], [5, 5, 6, 6]])
    parts = [head(x * scale, y, x) for scale in (1.0, 1.1)]
    mixed = Classes.mix(parts)
    mixed.nll(y).backward()
    assert torch.isfinite(x.grad).all()
    expected = sum(part.log_prob(y).exp() for part in parts) / 2
    assert torch.allclose(mixed.log_prob(y).exp(), expected)


def test_a_mixture_averages_densities():
    y = torch.randn(3, 2)
    parts = [Gaussian(torch.randn(3, 2), torch.rand(3, 2) + 0.1) for _ in range(4)]
    density = sum(part.log_prob(y).exp() for part in parts) / 4
    assert torch.allclose(Gaussian.mix(parts).log_prob(y).exp(), density)
    nested = GaussianMixture.mix([Gaussian.mix(parts[:2]), Gaussian.mix(parts[2:])])
    assert torch.allclose(nested.log_prob(y).exp(), density)


def test_classes_are_a_categorical_over_labels():
    prediction = NearestCentroid()(torch.randn(4, 2), torch.tensor([7, -1, 3, 3]), torch.randn(5, 2))
    assert isinstance(prediction, Classes)
    support = prediction.enumerate_support()
    assert torch.equal(support, torch.tensor([-1, 3, 7]).unsqueeze(-1).expand(3, 5))
    assert torch.allclose(prediction.log_prob(support).exp().sum(0), torch.ones(5))
    frequency = torch.stack([(prediction.sample((50_000,)) == label).double().mean(0) for label in (-1, 3, 7)], -1)
    assert torch.allclose(frequency, prediction.probs, atol=0.01)
    assert torch.equal(prediction.mode, torch.tensor([-1, 3, 7])[prediction.probs.argmax(-1)])
