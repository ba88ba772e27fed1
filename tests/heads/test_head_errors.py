"""What heads say of labels and shapes that cannot be right."""

import pytest
import torch
from head_cases import CLASSIFIERS, build, episode, every_classifier, every_head

from l2l_niw.errors import ArgumentError


@every_classifier
def test_an_unseen_label_in_the_query_is_an_error(head):
    model, (x, y, x_query, _) = build(head), episode(head)
    with pytest.raises(ArgumentError, match=r"query_y: label 8 is not among the support's classes \[0, 1, 2\]"):
        model(x, y, x_query).nll(torch.tensor([0, 1, 2, 8, 0, 1]))
    unchecked = model(x, y, x_query, ways=3).nll(torch.tensor([0, 1, 2, 8, 0, 1]))
    assert unchecked == float("inf")


@every_classifier
def test_the_episode_of_an_unseen_label_is_named(head):
    model, (x, y, x_query, y_query) = build(head), episode(head, 2)
    y, y_query = torch.stack([y[0], y[1] + 5]), y_query.clone()
    with pytest.raises(ArgumentError, match=r"label 0 is not among the support's classes \[5, 6, 7\] of episode 1"):
        model(x, y, x_query).nll(y_query)


@every_classifier
def test_more_classes_than_ways_is_no_number(head):
    model, (x, y, x_query, y_query) = build(head), episode(head)
    assert model(x, y, x_query, ways=2).nll(y_query).isnan()


@every_head
def test_targets_of_another_kind_or_shape_are_an_error(head):
    model, (x, y, x_query, y_query) = build(head), episode(head)
    other = "bayesian-ridge" if head in CLASSIFIERS else "ncc"
    with pytest.raises(ArgumentError, match=r"support_y is .* needs a tensor of"):
        model(x, episode(other)[1], x_query)
    with pytest.raises(ArgumentError, match="query_y has shape"):
        model(x, y, x_query).nll(y_query[:3])
    with pytest.raises(ArgumentError, match="query_y has shape"):
        model(x, y, x_query, y_query[:3])
    with pytest.raises(ArgumentError, match="support_x has shape"):
        model(x[:3], y, x_query)
    with pytest.raises(ArgumentError, match="query_x has shape"):
        model(x, y, x_query[:, :2])
    with pytest.raises(ArgumentError, match="support_y is empty"):
        model(x[:0], y[:0], x_query)
    with pytest.raises(ArgumentError, match="query_x is empty"):
        model(x, y, x_query[:0])
    with pytest.raises(ArgumentError, match="query_x must be a tensor"):
        model(x, y, x_query.numpy())
    with pytest.raises(ArgumentError, match="query_y must be a tensor"):
        model(x, y, x_query).nll(y_query.tolist())
    with pytest.raises(ArgumentError, match="query_y was given without a query"):
        model(x, y, query_y=y_query)
    with pytest.raises(ArgumentError, match="query_y has shape"):
        model(x, y).nll(y.expand(5, *y.shape))
    if model.head.features:
        with pytest.raises(ArgumentError, match="width 3, but the head was built for 8"):
            model.head(torch.randn(7, 3), y, torch.randn(6, 3))
    if head not in CLASSIFIERS:
        with pytest.raises(ArgumentError, match=r"support_y is torch.float64.*use .to\(torch.float32\)"):
            model(x, y.double(), x_query)


@every_classifier
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_integer_type(head, dtype):
    model, (x, y, x_query, y_query) = build(head), episode(head, ways=2)
    expected = model(x, y, x_query).nll(y_query)
    assert torch.equal(model(x, y.to(dtype), x_query).nll(y_query.to(dtype)), expected)
