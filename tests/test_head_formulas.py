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
from l2l_niw.heads import ANP, CNP, FEAT, BayesianRidge, Linear, MetaQDA, NearestCentroid, Ridge
from l2l_niw.heads.attention import Block, MultiHeadAttention, attend
from l2l_niw.heads.summaries import bayesian_aggregation
from l2l_niw.predictions import Classes, Evidence, Gaussian, GaussianMixture

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


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_torchs(masked):
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    mask = (torch.rand(2, 1, 5, 7) < 0.6) | (torch.arange(7) == 2) if masked else None
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.allclose(attend(query, key, value, mask), expected, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 4])
def test_multi_head_attention_is_torchs(heads):
    ours, theirs = MultiHeadAttention(8, heads), nn.MultiheadAttention(8, heads, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.zero_()
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    query, key, value = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)
    assert torch.allclose(ours(query, key, value), theirs(query, key, value)[0], atol=1e-12)


def test_bayesian_aggregation_is_one_conditioning_after_another():
    observed, raw = torch.randn(6, 3), torch.randn(6, 3)
    mean, variance = torch.zeros(3), torch.ones(3)
    for o, noise in zip(observed, 1e-5 + F.softplus(raw)):
        gain = variance / (variance + noise)
        mean, variance = mean + gain * (o - mean), (1 - gain) * variance
    for got, expected in zip(bayesian_aggregation(observed, raw), (mean, variance)):
        assert torch.allclose(got, expected, atol=1e-12)


def mlp(module, x):
    """An MLP by hand."""
    linear = [layer for layer in module.layers if isinstance(layer, nn.Linear)]
    for layer in linear[:-1]:
        x = torch.relu(x @ layer.weight.T + layer.bias)
    return x @ linear[-1].weight.T + linear[-1].bias


def decoded(head, query, *told, floor=0.01):
    """Mean and standard deviation for one query."""
    out = mlp(head.decoder, torch.cat([query, *told]))
    return torch.cat([out[:2], floor + torch.log1p(out[2:].exp())])


NP_DATA = (5, 4, 3)  # support, query, features


def process_data():
    n, m, d = NP_DATA
    return torch.randn(n, d), torch.randn(n, 2), torch.randn(m, d), torch.randn(m, 2)


def as_rows(prediction):
    return torch.cat([prediction.mean, prediction.stddev], -1)


@pytest.mark.parametrize("aggregate", ["mean", "max", "bayesian"])
def test_a_cnp_is_its_encoder_summary_and_decoder(aggregate):
    head = CNP(3, 2, width=4, aggregate=aggregate, floor=0.2)
    support, y, query, _ = process_data()
    r = torch.stack([mlp(head.encoder, torch.cat(pair)) for pair in zip(support, y)])
    if aggregate == "bayesian":
        observed, raw = head.summary.observe(r).chunk(2, -1)
        precision = 1 / (1e-5 + F.softplus(raw))
        variance = 1 / (1 + precision.sum(0))
        summary = torch.cat([variance * (precision * observed).sum(0), variance])
    else:
        summary = sum(r) / len(r) if aggregate == "mean" else r.max(0).values
    expected = torch.stack([decoded(head, q, summary, floor=0.2) for q in query])
    assert torch.allclose(as_rows(head(support, y, query)), expected, atol=1e-12)


def test_an_anp_attends_from_each_query_to_the_support():
    head = ANP(3, 2, width=4, heads=1, latent=False)
    support, y, query, _ = process_data()
    r = torch.stack([mlp(head.encoder, torch.cat(pair)) for pair in zip(support, y)])
    attention, embed = head.summary.attention, head.summary.embed
    rows = []
    for q in query:
        scores = torch.stack([attention.query(mlp(embed, q)) @ attention.key(mlp(embed, s)) / 2.0 for s in support])
        told = attention.out(scores.softmax(0) @ attention.value(r))
        rows.append(decoded(head, q, told))
    assert torch.allclose(as_rows(head(support, y, query)), torch.stack(rows), atol=1e-12)


@pytest.mark.parametrize("with_context", [False, True])
def test_a_block_has_a_shortcut_around_each_of_its_parts(with_context):
    block = Block(8, 2)
    x, context = torch.randn(5, 8), torch.randn(7, 8) if with_context else None
    seen = block.before(x if context is None else context)
    middle = x + block.attention(block.before(x), seen, seen)
    assert torch.allclose(block(x, context), middle + block.perceptron(block.between(middle)), atol=1e-12)
    for layer in (block.attention.out, block.perceptron[-1]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    assert torch.equal(block(x, context), x)


@pytest.mark.parametrize("layers", ["self_layers", "cross_layers"])
def test_an_anps_layers_take_part(layers):
    head, (support, y, query, _) = ANP(3, 2, width=4, heads=2, latent=False, **{layers: 1}), process_data()
    before = as_rows(head(support, y, query))
    block = (head.summary.among if layers == "self_layers" else head.summary.across)[0]
    nn.init.zeros_(block.perceptron[-1].weight)
    assert not torch.allclose(as_rows(head(support, y, query)), before)


@pytest.mark.parametrize("aggregate", ["mean", "max", "bayesian"])
@pytest.mark.parametrize("training", [True, False])
def test_a_latent_is_drawn_from_what_is_known(aggregate, training):
    head = CNP(3, 2, width=4, aggregate=aggregate, latent=True, deterministic=False)
    support, y, query, query_y = process_data()
    known = torch.cat([support, y], -1)
    if training:
        known = torch.cat([known, torch.cat([query, query_y], -1)])
    mean, raw = torch.stack([mlp(head.latent, pair) for pair in known]).chunk(2, -1)
    if aggregate == "bayesian":
        precision = 1 / (1e-5 + F.softplus(raw))
        scale = (1 + precision.sum(0)).rsqrt()
        mean = scale.square() * (precision * mean).sum(0)
    else:
        mean, raw = (t.mean(0) if aggregate == "mean" else t.max(0).values for t in (mean, raw))
        scale = 0.1 + 0.9 * torch.sigmoid(raw)
    torch.manual_seed(3)
    z = mean + scale * torch.randn(4)
    torch.manual_seed(3)
    prediction = head(support, y, query, query_y if training else None)
    assert torch.allclose(as_rows(prediction), torch.stack([decoded(head, q, z) for q in query]), atol=1e-12)


def test_several_draws_of_a_latent_are_a_mixture_in_prediction_and_one_in_training():
    head = CNP(3, 2, width=4, latent=True, samples=3)
    support, y, query, query_y = process_data()
    torch.manual_seed(3)
    mixture = head(support, y, query)
    head.samples = 1
    torch.manual_seed(3)
    parts = [head(support, y, query).log_prob(query_y).exp() for _ in range(3)]
    assert torch.allclose(mixture.log_prob(query_y).exp(), sum(parts) / 3)
    head.samples = 3
    assert isinstance(head(support, y, query, query_y), Gaussian)


def test_a_latents_loss_bounds_the_sets_likelihood():
    """-log p(Y | S) / m, by many draws from the prior, is below the mean loss, the negative ELBO."""
    head = CNP(3, 2, width=4, latent=True)
    support, y, query, query_y = process_data()
    with torch.no_grad():
        joint = torch.stack([head(support, y, query).log_prob(query_y).sum() for _ in range(4000)])
        exact = -(joint.logsumexp(0) - np.log(4000)) / len(query)
        bound = torch.stack([head(support, y, query, query_y).loss(query_y) for _ in range(1000)]).mean()
    assert exact - 0.02 < bound < exact + 5.0


def test_a_latents_penalty_is_its_kl_a_datum():
    head = CNP(3, latent=True, width=4)
    support, y, query, query_y = torch.randn(5, 3), torch.randn(5, 1), torch.randn(4, 3), torch.randn(4, 1)
    prediction = head(support, y, query, query_y)
    pairs = torch.cat([support, y], -1)
    prior, source = head.latent_law(pairs), head.latent_law(torch.cat([pairs, torch.cat([query, query_y], -1)]))
    z = source.sample((400_000,))
    estimate = (source.log_prob(z) - prior.log_prob(z)).mean() / 4
    assert prediction.penalty.item() == pytest.approx(estimate.item(), rel=0.05)
    assert prediction.loss(query_y).item() == pytest.approx((prediction.nll(query_y) + prediction.penalty).item())
    assert head(support, y, query).penalty == 0.0


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
    assert torch.allclose(prediction.mean, query @ head.readout.weight.T + head.readout.bias)
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
