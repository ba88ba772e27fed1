"""Scores of out-of-distribution queries, against scipy's and scikit-learn's."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from l2l_niw.errors import ArgumentError, ExtraError
from l2l_niw.metrics import auroc, entropy, fpr_at_95, max_probability, mutual_information, open_set


def sampled(samples=7, n=40, ways=5):
    torch.manual_seed(0)
    return (2 * torch.randn(samples, n, ways)).softmax(-1)


def drawn(n=500, shift=1.0, decimals=6):
    """Scores with queries of other classes above the others by a shift, rounded to make ties."""
    torch.manual_seed(0)
    is_open = torch.rand(n) < 0.3
    return (torch.randn(n) + shift * is_open).round(decimals=decimals), is_open


def test_scores_of_one_predictive():
    p = torch.tensor([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    assert torch.allclose(max_probability(p), torch.tensor([0.3, 0.0, 2 / 3]))
    assert np.allclose(entropy(p), stats.entropy(p, axis=-1))
    p = sampled()[0]
    assert np.allclose(entropy(p), stats.entropy(p, axis=-1), atol=1e-6)


def test_mutual_information_is_the_mean_divergence_from_the_average():
    p = sampled()
    expected = stats.entropy(p.double(), p.double().mean(0, keepdim=True), axis=-1).mean(0)
    assert np.allclose(mutual_information(p), expected, atol=1e-6)
    weights = torch.rand(7, 40).softmax(0)
    mean = (weights.unsqueeze(-1) * p).sum(0)
    expected = (weights.double().numpy() * stats.entropy(p.double(), mean.double().unsqueeze(0), axis=-1)).sum(0)
    assert np.allclose(mutual_information(p, weights), expected, atol=1e-6)


def test_posterior_samples_that_are_sure_of_different_labels_have_all_information():
    """Each is sure, so that the label is known once the weights are: H[E p] is all there is."""
    p = torch.eye(4).unsqueeze(1)
    assert mutual_information(p).item() == pytest.approx(math.log(4))
    weights = torch.tensor([0.5, 0.5, 0.0, 0.0])
    assert mutual_information(p, weights).item() == pytest.approx(math.log(2))
    same = sampled()[:1].expand(5, -1, -1)
    found = mutual_information(same)
    assert found.max() < 1e-9
    assert found.min() >= 0


@pytest.mark.parametrize("decimals", [0, 1, 6])
@pytest.mark.parametrize("shift", [-1.0, 0.0, 2.0])
def test_rates_are_those_of_scikit_learn(shift, decimals):
    scores, is_open = drawn(shift=shift, decimals=decimals)
    assert auroc(scores, is_open) == pytest.approx(roc_auc_score(is_open, scores), abs=1e-6)
    fpr, tpr, _ = roc_curve(~is_open, -scores, drop_intermediate=False)
    assert fpr_at_95(scores, is_open) == pytest.approx(fpr[tpr >= 0.95].min(), abs=1e-6)


def test_in_distribution_queries_are_the_positives():
    """Of 20 in-distribution queries 19 are accepted, those up to 0.19; of four others, two are as low as that."""
    scores = torch.cat([torch.arange(1, 21) / 100, torch.tensor([0.05, 0.19, 0.195, 0.5])])
    is_open = torch.arange(24) >= 20
    assert fpr_at_95(scores, is_open) == pytest.approx(0.5)
    # with the others as positives, all of the four are found at 0.05, with all but the four lowest of the 20
    assert fpr_at_95(-scores, ~is_open) == pytest.approx(16 / 20)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_only_the_order_of_scores_counts(factor):
    scores, is_open = drawn()
    assert auroc(factor * scores + 10, is_open) == pytest.approx(roc_auc_score(is_open, factor * scores + 10), abs=1e-6)
    last = scores.argmax()
    infinite = scores.index_fill(0, last, math.inf)
    assert auroc(infinite, is_open) == auroc(scores, is_open)
    assert fpr_at_95(infinite, is_open) == fpr_at_95(scores, is_open)


@pytest.mark.parametrize(
    ("scores", "is_open", "message"),
    [
        (torch.rand(3), torch.ones(3, dtype=torch.bool), "is_open must have both"),
        (torch.rand(3), torch.zeros(3, dtype=torch.bool), "is_open must have both"),
        (torch.rand(0), torch.zeros(0, dtype=torch.bool), "is_open must have both"),
        (torch.rand(3), torch.tensor([0, 1, 1]), "is_open bool"),
        (torch.rand(3), torch.tensor([True, False]), "Flatten"),
        (torch.rand(1, 2), torch.tensor([[True, False]]), "Flatten"),
        (torch.tensor([math.nan, 1.0]), torch.tensor([True, False]), "scores must not be nan"),
    ],
)
def test_bad_scores_are_named(scores, is_open, message):
    for rate in (auroc, fpr_at_95):
        with pytest.raises(ArgumentError, match=message):
            rate(scores, is_open)


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (torch.randn(3, 2), "softmax"),
        (torch.full((3, 2), 0.4), "sum to 1"),
        (torch.full((3, 2), torch.nan), "diverged"),
        (torch.zeros(0, 2), "one example"),
        (torch.ones(3, 1), "two ways"),
    ],
)
def test_bad_probabilities_are_named(probabilities, message):
    for score in (max_probability, entropy):
        with pytest.raises(ArgumentError, match=message):
            score(probabilities)
    with pytest.raises(ArgumentError, match=message):
        mutual_information(probabilities.expand(4, *probabilities.shape))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(7), "sum to 1 over samples"),
        (torch.tensor([2.0, -1.0, 0, 0, 0, 0, 0]), "negative"),
        (torch.full((7,), torch.nan), "negative"),
        (torch.full((40,), 1 / 40), r"\(samples,\)"),
        (torch.full((40, 7), 1 / 40), r"\(samples, n\)"),
    ],
)
def test_bad_weights_are_named(weights, message):
    with pytest.raises(ArgumentError, match="weights.*" + message):
        mutual_information(sampled(), weights)


def test_bad_shapes_are_named():
    with pytest.raises(ArgumentError, match="samples, n, ways"):
        mutual_information(sampled()[0])
    with pytest.raises(ArgumentError, match="Flatten"):
        entropy(sampled())


def test_the_extra_is_named(monkeypatch):
    def missing(package, extra):
        raise ExtraError(f"pip install 'l2l_niw[{extra}]'")

    monkeypatch.setattr(open_set, "require", missing)
    for rate in (auroc, fpr_at_95):
        with pytest.raises(ExtraError, match=r"l2l_niw\[vision\]"):
            rate(*drawn())
