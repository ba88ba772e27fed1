"""Selective prediction, against curves by hand and random orders of ties."""

import itertools
import math

import numpy as np
import pytest
import torch

from l2l_niw.errors import ArgumentError, ExtraError
from l2l_niw.metrics import aurc, excess_aurc, plot_risk_coverage, risk_coverage, selective


def in_order(confidence, errors, order):
    """Risks in numpy: examples are taken in this order, the most confident first."""
    taken = sorted(order, key=lambda i: -confidence[i])  # a stable sort leaves ties in the order given
    return np.cumsum([errors[i] for i in taken]) / np.arange(1, len(taken) + 1)


def test_a_curve_by_hand():
    found = risk_coverage(torch.tensor([0.9, 0.2, 0.7, 0.5]), torch.tensor([False, True, False, True]))
    assert found.coverages.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert found.risks.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 2])
    found = risk_coverage(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([4.0, 1.0, 9.0]))
    assert found.risks.tolist() == pytest.approx([1.0, 5.0, 14 / 3])


def test_without_ties_it_is_the_mean_over_prefixes():
    torch.manual_seed(0)
    confidence, errors = torch.rand(300), torch.randn(300).square()
    expected = in_order(confidence.tolist(), errors.tolist(), range(300))
    assert np.allclose(risk_coverage(confidence, errors).risks, expected, atol=1e-6)
    assert aurc(confidence, errors) == pytest.approx(expected.mean(), rel=1e-6)


def test_ties_are_averaged_over_all_their_orders():
    confidence = torch.tensor([0.5, 0.9, 0.5, 0.9, 0.5, 0.1, -math.inf])
    errors = torch.tensor([1.0, 0.0, 3.0, 2.0, 0.5, 4.0, 1.0])
    every = [in_order(confidence.tolist(), errors.tolist(), order) for order in itertools.permutations(range(7))]
    assert np.allclose(risk_coverage(confidence, errors).risks, np.mean(every, 0))
    for order in (torch.randperm(7, generator=torch.Generator().manual_seed(i)) for i in range(5)):
        assert aurc(confidence[order], errors[order]) == pytest.approx(np.mean(every), rel=1e-12)


def test_confidence_that_knows_nothing_has_the_mean_error():
    errors = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    assert aurc(torch.full((5,), 0.3), errors) == pytest.approx(0.6)


def test_the_excess_is_above_the_best_of_all_orders():
    torch.manual_seed(0)
    confidence, errors = torch.rand(7), torch.tensor([0.0, 1.0, 0.0, 2.5, 1.0, 0.0, 0.3])
    orders = itertools.permutations(range(7))
    best = min(in_order([0.0] * 7, errors.tolist(), order).mean() for order in orders)
    assert excess_aurc(confidence, errors) == pytest.approx(aurc(confidence, errors) - best)
    assert excess_aurc(confidence, errors) > 0.1
    assert excess_aurc(-errors, errors) == 0.0
    assert excess_aurc(torch.tensor([0.2, 0.9]), torch.tensor([True, False])) == 0.0


def test_curves_are_drawn_into_one_picture(tmp_path):
    found = risk_coverage(torch.rand(50), torch.rand(50) < 0.3)
    plot_risk_coverage({"one": found, "two": found}, tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("confidence", "errors", "message"),
    [
        (torch.rand(3), torch.rand(2), "Flatten"),
        (torch.rand(3, 1), torch.rand(3, 1), "Flatten"),
        (torch.rand(0), torch.rand(0), "one example"),
        (torch.tensor([math.nan, 0.0]), torch.rand(2), "confidence must not be nan"),
        (torch.rand(2), torch.tensor([math.nan, 0.0]), "errors must be finite"),
        (torch.rand(2), torch.tensor([math.inf, 0.0]), "errors must be finite"),
    ],
)
def test_bad_input_is_named(confidence, errors, message):
    for score in (risk_coverage, aurc, excess_aurc):
        with pytest.raises(ArgumentError, match=message):
            score(confidence, errors)


def test_a_picture_of_nothing_and_a_missing_extra_are_named(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="curves"):
        plot_risk_coverage({}, tmp_path / "none.png")

    def missing(package, extra):
        raise ExtraError(f"pip install 'l2l_niw[{extra}]'")

    monkeypatch.setattr(selective, "require", missing)
    with pytest.raises(ExtraError, match=r"l2l_niw\[examples\]"):
        plot_risk_coverage({"one": risk_coverage(torch.rand(5), torch.rand(5))}, tmp_path / "one.png")
