"""Calibration of classifiers, against laws whose calibration is known."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize

from l2l_niw.metrics import calibration
from l2l_niw.metrics.calibration import (
    accuracy,
    at_temperature,
    brier,
    ece,
    ece_all,
    fit_temperature,
    nll,
    plot_reliability,
    reliability,
    scores,
)
from l2l_niw.errors import ArgumentError, ExtraError


def drawn(n=200_000, ways=5, sharpen=1.0, seed=0):
    """Labels drawn from probabilities, and those probabilities raised to a power: calibrated at the power 1."""
    torch.manual_seed(seed)
    truth = (2 * torch.randn(n, ways)).softmax(-1)
    y = torch.multinomial(truth, 1).squeeze(1)
    return at_temperature(truth, 1 / sharpen), y, truth


def by_hand(confidence, right, bins=20):
    """The expected calibration error in numpy: bins [lower, upper), the last one closed, each by its share."""
    total = 0.0
    for k in range(bins):
        inside = (confidence >= k / bins) & ((confidence < (k + 1) / bins) | (k + 1 == bins))
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    return total


def test_labels_drawn_from_the_probabilities_are_calibrated():
    probabilities, y, _ = drawn()
    assert ece(probabilities, y) < 0.005
    assert ece_all(probabilities, y) < 0.005
    assert fit_temperature(probabilities, y) == pytest.approx(1.0, abs=0.02)


def test_scores_are_those_written_out():
    probabilities, y, _ = drawn(3000, sharpen=2.0)
    p, labels = probabilities.double().numpy(), y.numpy()
    assert ece(probabilities, y) == pytest.approx(by_hand(p.max(1), p.argmax(1) == labels), abs=1e-6)
    assert ece(probabilities, y, bins=7) == pytest.approx(by_hand(p.max(1), p.argmax(1) == labels, 7), abs=1e-6)
    hits = np.eye(5)[labels]
    assert ece_all(probabilities, y) == pytest.approx(by_hand(p.ravel(), hits.ravel()), abs=1e-6)
    assert nll(probabilities, y) == pytest.approx(-np.log(p[np.arange(3000), labels]).mean(), rel=1e-6)
    assert brier(probabilities, y) == pytest.approx(((p - hits) ** 2).sum(1).mean(), rel=1e-5)
    assert accuracy(probabilities, y) == pytest.approx((p.argmax(1) == labels).mean())


def test_a_known_overconfidence_has_a_known_error():
    """Right with a rate of 0.6 and always sure of 0.9: the error is 0.3, and the temperature is in closed form."""
    y = torch.zeros(1000, dtype=torch.long)
    probabilities = torch.tensor([0.9, 0.1]).repeat(1000, 1)
    probabilities[600:] = torch.tensor([0.1, 0.9])
    assert ece(probabilities, y) == pytest.approx(0.3, abs=1e-4)
    expected = math.log(9) / math.log(1.5)  # 0.9 / 0.1 to the power 1 / T must be 0.6 / 0.4
    assert fit_temperature(probabilities, y) == pytest.approx(expected, rel=1e-5)
    assert ece(at_temperature(probabilities, expected), y) == pytest.approx(0.0, abs=1e-4)
    found = scores(probabilities, y, expected)
    assert found["ece_ts"] == pytest.approx(0.0, abs=1e-4)
    assert found["nll_ts"] == pytest.approx(-(0.6 * math.log(0.6) + 0.4 * math.log(0.4)), rel=1e-5)
    assert "ece_ts" not in scores(probabilities, y)


def test_a_probability_of_one_is_in_the_last_bin_and_rounding_above_it_changes_nothing():
    sure, nearly = torch.tensor([[1.0, 0.0]]).repeat(50, 1), torch.tensor([[0.96, 0.04]]).repeat(50, 1)
    y = torch.tensor([0] * 48 + [1] * 2 + [0] * 50)  # 98 of 100 right, confidence 0.98 on average: one bin, no error
    probabilities = torch.cat([sure, nearly])
    assert ece(probabilities, y) == pytest.approx(0.0, abs=1e-5)
    found = reliability(probabilities, y)
    assert found.counts.tolist() == [0] * 19 + [100]
    assert found.accuracy[-1].item() == pytest.approx(0.98)
    before = ece_all(probabilities, y)
    probabilities[0, 0] = 1.0000002
    assert ece(probabilities, y) == pytest.approx(0.0, abs=1e-5)
    assert ece_all(probabilities, y) == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize("sharpen", [0.4, 3.0])
def test_a_temperature_undoes_a_power(sharpen):
    probabilities, y, truth = drawn(50_000, sharpen=sharpen)
    temperature = fit_temperature(probabilities, y)
    assert temperature == pytest.approx(sharpen, rel=0.03)
    assert torch.allclose(at_temperature(probabilities, sharpen), truth, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 1.0, 30.0])
def test_the_temperature_is_found_however_small_or_large_logits_are(factor):
    torch.manual_seed(0)
    logits = torch.randn(1000, 5, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
    expected = fit_temperature(logits.softmax(-1), y)
    near = logits.softmax(-1).log() * factor
    assert fit_temperature(near.softmax(-1), y) == pytest.approx(factor * expected, rel=1e-6)


def test_the_temperature_of_an_average_is_the_best_one():
    torch.manual_seed(0)
    mean = (3 * torch.randn(10, 2000, 4)).softmax(-1).mean(0)
    y = torch.multinomial(mean.square(), 1).squeeze(1)
    best = optimize.minimize_scalar(lambda t: nll(at_temperature(mean, math.exp(t)), y), bracket=(-1, 1))
    assert fit_temperature(mean, y) == pytest.approx(math.exp(best.x), rel=1e-3)


def test_a_probability_of_zero_is_no_nan():
    probabilities = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.4]])
    assert nll(probabilities, torch.tensor([0, 0, 1])) == math.inf
    assert math.isfinite(fit_temperature(probabilities, torch.tensor([0, 1, 1])))
    assert at_temperature(probabilities, 2.0).isfinite().all()


def test_a_diagram_s_bins_are_those_of_the_error(tmp_path):
    probabilities, y, _ = drawn(4000, sharpen=2.0)
    found = reliability(probabilities, y, bins=10)
    known = found.counts > 0
    gaps = (found.confidence - found.accuracy).abs()[known] * found.counts[known]
    assert gaps.sum().item() / 4000 == pytest.approx(ece(probabilities, y, bins=10), abs=1e-6)
    assert found.counts.sum() == 4000
    assert found.counts[:2].sum() == 0  # of five ways the most probable one has a fifth at least
    assert found.accuracy[:2].isnan().all()
    plot_reliability({"one": found, "two": found}, tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("probabilities", "y", "message"),
    [
        (torch.randn(3, 2), torch.zeros(3, dtype=torch.long), "softmax"),
        (torch.full((3, 2), torch.nan), torch.zeros(3, dtype=torch.long), "diverged"),
        (torch.full((3, 2), 0.5), torch.zeros(2, dtype=torch.long), "Flatten"),
        (torch.full((3, 2), 0.5), torch.full((3,), 2), "labels from 0 to 1"),
        (torch.full((3, 2), 0.5), torch.zeros(3), "torch.long"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), "one example"),
    ],
)
def test_bad_input_is_named(probabilities, y, message):
    for score in (ece, ece_all, nll, brier, accuracy, fit_temperature, reliability):
        with pytest.raises(ArgumentError, match=message):
            score(probabilities, y)


def test_other_bad_arguments_are_named(tmp_path):
    good = torch.full((3, 2), 0.5), torch.zeros(3, dtype=torch.long)
    for score in (ece, ece_all, reliability):
        with pytest.raises(ArgumentError, match="bins"):
            score(*good, bins=0)
    with pytest.raises(ArgumentError, match="temperature"):
        at_temperature(good[0], 0.0)
    with pytest.raises(ArgumentError, match="diagrams"):
        plot_reliability({}, tmp_path / "none.png")


@pytest.mark.parametrize("y", [[0, 1], [1, 0]])
def test_labels_that_are_all_most_probable_or_never_have_no_best_temperature(y):
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    with pytest.raises(ArgumentError, match="no temperature is best"):
        fit_temperature(probabilities, torch.tensor(y))


def test_the_extra_is_named(monkeypatch):
    def missing(package, extra):
        raise ExtraError(f"pip install 'l2l_niw[{extra}]'")

    monkeypatch.setattr(calibration, "require", missing)
    with pytest.raises(ExtraError, match=r"l2l_niw\[vision\]"):
        ece(torch.full((3, 2), 0.5), torch.zeros(3, dtype=torch.long))
