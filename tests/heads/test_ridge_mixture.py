"""A mixture of ridge regressions against scipy's Gaussians."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from l2l_niw.errors import ArgumentError
from l2l_niw.heads import BayesianRidge, RidgeMixture
from l2l_niw.heads.predictions import EvidenceMixture


@pytest.mark.parametrize(("n", "d"), [(3, 6), (7, 7), (9, 4)])
def test_a_mixture_of_ridges_is_a_mixture_of_conditioned_gaussians(n, d, double):
    """Of each component the joint law of support and query is Gaussian: scipy weighs it, a conditional predicts."""
    phi, query, y, y_query = torch.randn(n, d), torch.randn(5, d), torch.randn(n, 2), torch.randn(5, 2)
    head = RidgeMixture(d, components=3, targets=2, noise=0.4)
    with torch.no_grad():
        head.mean.normal_()
        head.logits.normal_()
    everything = np.hstack([torch.cat([phi, query]).numpy(), np.ones((n + 5, 1))])
    laws, evidence = [], []
    for k in range(3):
        scale, mean = head.log_scale[k].detach().exp().numpy(), everything @ head.mean[k].detach().numpy()
        cov = everything @ np.diag(scale**2) @ everything.T + 0.4**2 * np.eye(n + 5)
        gain = cov[n:, :n] @ np.linalg.inv(cov[:n, :n])
        laws.append((mean[n:] + gain @ (y.numpy() - mean[:n]), np.sqrt(np.diag(cov[n:, n:] - gain @ cov[:n, n:]))))
        columns = [stats.multivariate_normal(mean[:n, t], cov[:n, :n]).logpdf(y[:, t].numpy()) for t in range(2)]
        evidence.append(head.logits.log_softmax(-1)[k].item() + sum(columns))
    weights = special.softmax(evidence)
    prediction = head(phi, y, query)
    assert np.allclose(prediction.mean.detach(), sum(w * m for w, (m, _) in zip(weights, laws)))
    densities = [w * stats.norm(m, s[:, None]).pdf(y_query).prod(1) for w, (m, s) in zip(weights, laws)]
    assert np.allclose(prediction.log_prob(y_query).detach(), np.log(sum(densities)))
    levels = [w * stats.norm(m, s[:, None]).cdf(y_query) for w, (m, s) in zip(weights, laws)]
    assert np.allclose(prediction.cdf(y_query).detach(), sum(levels))
    assert head(phi, y).log_prob(y).item() == pytest.approx(special.logsumexp(evidence))
    assert head(phi, y).nll(y).item() == pytest.approx(-special.logsumexp(evidence) / n)


def test_one_component_with_equal_scales_is_bayesian_ridge(double):
    phi, query, y, y_query = torch.randn(2, 6, 4), torch.randn(2, 5, 4), torch.randn(2, 6, 1), torch.randn(2, 5, 1)
    head, plain = RidgeMixture(4, 1, noise=0.4), BayesianRidge(noise=0.4, prior_scale=1.7)
    with torch.no_grad():
        head.log_scale.fill_(math.log(1.7))
    assert torch.allclose(head(phi, y, query).log_prob(y_query), plain(phi, y, query).log_prob(y_query))
    assert torch.allclose(head(phi, y).nll(y), plain(phi, y).nll(y))


def test_samples_of_a_mixture_s_evidence_are_of_its_law(double):
    torch.manual_seed(0)
    head = RidgeMixture(2, components=2)
    with torch.no_grad():
        head.mean.normal_(std=3.0)
        head.logits.copy_(torch.tensor([0.0, 1.0]))
    phi = torch.randn(3, 2)
    prediction = head(phi, torch.zeros(3, 1))
    drawn = prediction.sample((20_000,))
    assert drawn.shape == (20_000, 3, 1)
    # the Kullback-Leibler identity: under its own law E[log q / p] = -KL(p || q) <= 0, and E[exp(log q / p)] = 1
    other = EvidenceMixture(prediction.parts, prediction.means + 0.1, prediction.log_weights)
    ratio = (other.log_prob(drawn) - prediction.log_prob(drawn)).exp()
    assert ratio.mean().item() == pytest.approx(1.0, abs=4 * ratio.std().item() / 20_000**0.5)


def test_bad_input_is_named():
    with pytest.raises(ArgumentError, match="components"):
        RidgeMixture(4, 0)
    with pytest.raises(ArgumentError, match="prior_scale"):
        RidgeMixture(4, prior_scale=0.0)
    with pytest.raises(ArgumentError, match="2 targets, but the head was built for 1"):
        RidgeMixture(4)(torch.randn(3, 4), torch.randn(3, 2))


def test_a_component_whose_scales_outgrow_float32_is_left_to_itself():
    head = RidgeMixture(4, 2)
    phi, query, y = torch.randn(5, 4), torch.randn(3, 4), torch.randn(5, 1)
    with torch.no_grad():
        head.log_scale[0] = 0.0
        head.log_scale[1] = 12.0
    prediction = head(phi, y, query)
    alone = BayesianRidge(prior_scale=1.0)(phi, y, query)
    assert torch.allclose(prediction.mean, alone.mean, atol=1e-3)
    assert prediction.mean.dtype == torch.float32
    head(phi, y).nll(y).backward()
    assert all(p.grad.isfinite().all() for p in head.parameters())
