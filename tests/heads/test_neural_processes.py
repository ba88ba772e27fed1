"""Attention and neural processes against loops, torch's own attention and Monte Carlo."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from l2l_niw.heads import ANP, CNP
from l2l_niw.heads._attention import Block, MultiHeadAttention, attend
from l2l_niw.heads._summaries import bayesian_aggregation
from l2l_niw.heads.predictions import Gaussian


@pytest.fixture(autouse=True)
def in_double(double):
    pass


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
