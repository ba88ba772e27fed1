"""Conformal prediction over tasks that differ: thresholds by hand, and coverage of new tasks."""

import math

import pytest
import torch
from scipy import stats
from torch.distributions import Normal

from l2l_niw.errors import ArgumentError
from l2l_niw.heads.predictions import GaussianMixture
from l2l_niw.metrics import (
    cdf_scores,
    conformal_threshold,
    coverage,
    interval_coverage,
    label_scores,
    mean_set_size,
    prediction_interval,
    prediction_sets,
)

LEVELS = [0.5, 0.8, 0.9, 0.95]
TRIALS, TASKS, QUERIES, WAYS = 1000, 20, 5, 4


def within(hits, level, tasks=TASKS, queries=QUERIES):
    """Coverage by a rate of independent hits: at least the level, above it by what K tasks can resolve at most."""
    rate, error = hits.double().mean().item(), 3.5 * math.sqrt(level * (1 - level) / len(hits))
    return level - error <= rate <= level + (1 + 1 / queries) / (tasks + 1) + error


def classes(trials=TRIALS, tasks=TASKS, queries=QUERIES):
    """Tasks of a new difficulty each: labels are drawn at a temperature of the task's own, which the model ignores."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(trials, tasks + 1, queries, WAYS)
    sharpness = torch.randn(trials, tasks + 1, 1, 1).exp()
    truth = (sharpness * logits).softmax(-1)
    y = torch.multinomial(truth.reshape(-1, WAYS), 1).reshape(truth.shape[:-1])
    return logits.softmax(-1), y


def targets(trials=TRIALS, tasks=TASKS, queries=QUERIES):
    """Targets of a standard normal model, with a shift and a scale of each task's own."""
    torch.manual_seed(0)
    shift, scale = torch.randn(trials, tasks + 1, 1), torch.randn(trials, tasks + 1, 1).exp()
    return (shift + scale * torch.randn(trials, tasks + 1, queries)).double()


def thresholds(scores, level):
    """Of each trial, from all of its tasks but the last."""
    return torch.tensor([conformal_threshold(trial, level) for trial in scores[:, :-1]], dtype=torch.float64)


def pooled(scores, level):
    """The usual threshold of split conformal prediction, which takes all queries for exchangeable."""
    values = scores.reshape(-1).sort().values
    return values[min(math.ceil(level * (len(values) + 1)), len(values)) - 1].item()


@pytest.mark.parametrize("adaptive", [False, True])
def test_sets_cover_a_query_of_a_new_task(adaptive):
    probabilities, y = classes()
    flat, labels = probabilities.reshape(-1, WAYS), y.reshape(-1)
    u = torch.rand(len(flat)) if adaptive else None
    scores = label_scores(flat, labels, u).reshape(y.shape)
    new, y_new = probabilities[:, -1, 0], y[:, -1, 0]
    u_new = u.reshape(y.shape)[:, -1, 0] if adaptive else None
    for level in LEVELS:
        found = thresholds(scores, level)
        parts = zip(new.split(1), found.tolist(), u_new.split(1) if adaptive else [None] * TRIALS)
        sets = torch.cat([prediction_sets(p, t, v) for p, t, v in parts])
        assert within(sets.gather(1, y_new.unsqueeze(1)), level), level


def test_intervals_cover_a_query_of_a_new_task():
    y = targets()
    model = Normal(torch.zeros(1).double(), 1.0)
    scores = cdf_scores(model.cdf(y))
    wide = torch.full((1,), 60.0).double()
    for level in LEVELS:
        found = thresholds(scores, level)
        hits = scores[:, -1, 0] <= found
        assert within(hits, level), level
        ends = [prediction_interval(model.cdf, t, -wide, wide) for t in found[:40].tolist()]
        inside = [interval_coverage(low, high, new) for (low, high), new in zip(ends, y[:, -1, :1])]
        assert inside == hits[:40].tolist()
        assert within(y[:, -1, 0].abs() <= thresholds(y.abs(), level), level), level  # standardised residuals


def test_pooling_queries_covers_too_rarely_and_tasks_do_not():
    """Nine tasks of 50 queries, alike within a task: pooled queries seem to be 450 but tell of 9 tasks."""
    y = targets(2000, tasks=9, queries=50)
    scores = (y[..., :1] + 0.01 * y).abs()
    new, level = scores[:, -1, 0], 0.85
    error = 3.5 * math.sqrt(level * (1 - level) / len(new))
    naive = torch.tensor([pooled(trial, level) for trial in scores[:, :-1]])
    assert (new <= naive).double().mean() < level - error
    assert within(new <= thresholds(scores, level), level, tasks=9, queries=1)


def test_a_threshold_by_hand():
    """Four tasks with a mass of 1/5 each; the second one has two queries of 1/10."""
    scores = [torch.tensor([0.5]), torch.tensor([0.1, 0.9]), torch.tensor([0.3]), torch.tensor([0.7])]
    steps = {0.1: 0.1, 0.11: 0.3, 0.3: 0.3, 0.31: 0.5, 0.5: 0.5, 0.7: 0.7, 0.71: 0.9, 0.8: 0.9, 0.81: math.inf}
    for level, expected in steps.items():
        assert conformal_threshold(scores, level) == pytest.approx(expected), level


@pytest.mark.parametrize("queries", [1, 7, 1000])
@pytest.mark.parametrize("tasks", [1, 9, 19, 99])
def test_few_tasks_promise_little_however_many_their_queries(tasks, queries):
    """K tasks reach the level K / (K + 1), with their highest score, and no higher one."""
    scores = torch.rand(tasks, queries, generator=torch.Generator().manual_seed(0)).double()
    highest = tasks / (tasks + 1)
    assert conformal_threshold(scores, highest) == scores.max().item()
    assert conformal_threshold(scores, highest + 1e-6) == math.inf
    assert pooled(scores, highest + 1e-6) < math.inf


def test_with_one_query_per_task_it_is_split_conformal_prediction():
    scores = torch.rand(57, 1, generator=torch.Generator().manual_seed(0)).double()
    for level in LEVELS:
        assert conformal_threshold(scores, level) == pooled(scores, level)


def test_label_scores_by_hand():
    p, y = torch.tensor([[0.2, 0.5, 0.3]]).double().repeat(3, 1), torch.arange(3)
    assert label_scores(p, y).tolist() == pytest.approx([0.8, 0.5, 0.7])
    assert label_scores(p, y, torch.full((3,), 0.5)).tolist() == pytest.approx([0.9, 0.25, 0.65])
    assert prediction_sets(p[:1], label_scores(p, y)[2].item()).tolist() == [[False, True, True]]  # a label's own score
    assert prediction_sets(p[:1], 0.65, torch.tensor([0.4])).tolist() == [[False, True, True]]
    assert prediction_sets(p[:1], 0.65, torch.tensor([0.6])).tolist() == [[False, True, False]]
    assert prediction_sets(p[:1], 0.1).tolist() == [[False] * 3]
    assert prediction_sets(p[:1], math.inf, torch.tensor([1.0])).all()


def test_adaptive_scores_of_labels_from_the_probabilities_are_uniform():
    torch.manual_seed(0)
    p = (2 * torch.randn(20_000, 5)).softmax(-1)
    y = torch.multinomial(p, 1).squeeze(1)
    assert stats.kstest(label_scores(p, y, torch.rand(20_000)), "uniform").pvalue > 0.01
    assert stats.kstest(label_scores(p, y), "uniform").pvalue < 1e-6


def test_an_interval_is_central():
    model = stats.norm(1.0, 2.0)
    wide = torch.full((1,), 50.0).double()
    low, high = prediction_interval(Normal(torch.ones(1).double(), 2.0).cdf, 0.8, -wide, wide)
    assert (low.item(), high.item()) == pytest.approx(model.interval(0.8), abs=1e-9)
    assert cdf_scores(torch.tensor([model.cdf(x) for x in (low.item(), 1.0, high.item())])).tolist() == pytest.approx(
        [0.8, 0.0, 0.8]
    )
    for threshold in (1.0, 1 - 2**-53, math.inf):
        low, high = prediction_interval(Normal(0.0, 1.0).cdf, threshold, -wide, wide)
        assert (low.item(), high.item()) == (-math.inf, math.inf)


def test_an_interval_of_a_mixture_has_targets_of_at_most_the_threshold():
    means, scales = torch.tensor([[[-3.0], [3.0]]]).double(), torch.tensor([[[0.5], [1.0]]]).double()
    model = GaussianMixture(means, scales)
    wide = torch.full((1, 1), 50.0).double()
    low, high = prediction_interval(model.cdf, 0.6, -wide, wide)
    y = torch.linspace(-8, 8, 2001).double().reshape(-1, 1, 1)
    assert torch.equal((low <= y) & (y <= high), cdf_scores(model.cdf(y)) <= 0.6)


def test_coverage_and_size_by_hand():
    sets = torch.tensor([[True, False, True], [False, False, False], [True, True, True], [False, True, False]])
    assert coverage(sets, torch.tensor([0, 1, 2, 0])) == 0.5
    assert mean_set_size(sets) == 1.5
    low, high = torch.tensor([0.0, -math.inf, 1.0, 1.0]), torch.tensor([1.0, math.inf, 2.0, 2.0])
    assert interval_coverage(low, high, torch.tensor([1.0, 5.0, 0.9, 2.1])) == 0.5
    assert interval_coverage(low, high, torch.tensor([0.0, -5.0, 2.0, 1.0])) == 1.0  # both ends belong to it


@pytest.mark.parametrize(
    ("scores", "level", "message"),
    [
        (torch.rand(5), 0.9, r"scores.*\(tasks, 1\)"),
        (torch.rand(()), 0.9, r"scores.*\(tasks, 1\)"),
        (torch.rand(0, 5), 0.9, "scores.*one task"),
        (torch.rand(5, 0), 0.9, "scores.*one query"),
        ([], 0.9, "scores.*one task"),
        ([torch.rand(3), torch.rand(0)], 0.9, "scores.*one query"),
        (torch.full((3, 2), math.nan), 0.9, "scores must not be nan"),
        (torch.rand(3, 2), 0.0, "level"),
        (torch.rand(3, 2), 1.0, "level"),
        (torch.rand(3, 2), 90, "level"),
        (torch.rand(3, 2), math.nan, "level"),
    ],
)
def test_bad_scores_are_named(scores, level, message):
    with pytest.raises(ArgumentError, match=message):
        conformal_threshold(scores, level)


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (torch.full((3, 2), 0.4), "probabilities.*sum to 1"),
        (torch.full((3, 2), math.nan), "probabilities.*diverged"),
        (torch.zeros(0, 2), "probabilities.*one example"),
        (torch.full((3, 3, 2), 0.5), "probabilities.*Flatten"),
    ],
)
def test_bad_probabilities_are_named(probabilities, message):
    with pytest.raises(ArgumentError, match=message):
        label_scores(probabilities, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ArgumentError, match=message):
        prediction_sets(probabilities, 0.5)


@pytest.mark.parametrize("u", [torch.rand(2), torch.full((3,), 1.5), torch.full((3,), math.nan), torch.rand(3, 1)])
def test_bad_random_numbers_are_named(u):
    p = torch.full((3, 2), 0.5)
    with pytest.raises(ArgumentError, match=r"u must be.*torch.rand\(n\)"):
        label_scores(p, torch.zeros(3, dtype=torch.long), u)
    with pytest.raises(ArgumentError, match=r"u must be.*torch.rand\(n\)"):
        prediction_sets(p, 0.5, u)


@pytest.mark.parametrize("y", [torch.zeros(2, dtype=torch.long), torch.zeros(3), torch.full((3,), 2)])
def test_bad_labels_are_named(y):
    for call in (lambda: label_scores(torch.full((3, 2), 0.5), y), lambda: coverage(torch.ones(3, 2).bool(), y)):
        with pytest.raises(ArgumentError, match="y must be"):
            call()


@pytest.mark.parametrize("threshold", [-0.1, math.nan])
def test_bad_thresholds_are_named(threshold):
    for call in (
        lambda: prediction_sets(torch.full((3, 2), 0.5), threshold),
        lambda: prediction_interval(Normal(0.0, 1.0).cdf, threshold, -torch.ones(1), torch.ones(1)),
    ):
        with pytest.raises(ArgumentError, match="threshold.*conformal_threshold"):
            call()


def test_other_bad_input_is_named():
    for bad in (torch.tensor([1.1]), torch.tensor([-0.1]), torch.tensor([math.nan])):
        with pytest.raises(ArgumentError, match="cdf must lie between"):
            cdf_scores(bad)
    for bad in (torch.rand(3, 2), torch.ones(3).bool(), torch.ones(0, 2).bool()):
        with pytest.raises(ArgumentError, match=r"sets must be bool.*prediction_sets"):
            coverage(bad, torch.zeros(3, dtype=torch.long))
        with pytest.raises(ArgumentError, match=r"sets must be bool.*prediction_sets"):
            mean_set_size(bad)
    for y in (torch.rand(3, 1), torch.rand(2)):
        with pytest.raises(ArgumentError, match="one shape"):
            interval_coverage(torch.zeros(3), torch.ones(3), y)
    with pytest.raises(ArgumentError, match="one target"):
        interval_coverage(torch.zeros(0), torch.zeros(0), torch.zeros(0))
    for low, y in ((2.0, 0.5), (math.nan, 0.5), (0.0, math.nan)):
        with pytest.raises(ArgumentError, match="low must not be above high"):
            interval_coverage(torch.tensor([low]), torch.tensor([1.0]), torch.tensor([y]))
