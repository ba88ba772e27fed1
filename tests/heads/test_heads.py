"""The case that every head passes, in plain training, under MAML and under NIW."""

import copy

import pytest
import torch
from head_cases import (
    CLASSIFIERS,
    FEATURES,
    HEADS,
    INPUTS,
    build,
    density,
    episode,
    every_classifier,
    every_head,
    every_method,
    run_episode,
    seeded_call,
    targets,
    wrap,
)
from torch.func import functional_call, vmap

from l2l_niw import NIW


@every_head
@every_method
def test_shapes_and_a_gradient_for_every_parameter(head, method):
    data = episode(head)
    prediction, trained = run_episode(method, build(head), data)
    if head in CLASSIFIERS:
        assert prediction.logits.shape == (6, 3)
        assert torch.allclose(prediction.probs.sum(-1), torch.ones(6))
        assert prediction.mode.shape == prediction.sample().shape == (6,)
    else:
        assert prediction.mean.shape == prediction.variance.shape == prediction.sample().shape == (6, 2)
        assert (prediction.variance > 0).all()
    assert prediction.nll(data[3]).shape == ()
    assert prediction.n == 6
    for name, p in trained.named_parameters():
        assert torch.isfinite(p.grad).all(), name
        assert method != "plain" or p.grad.abs().max() > 0, name


@every_head
@pytest.mark.parametrize("method", ["niw", "niw-ggn"])
def test_a_posterior_averages_predictions(head, method):
    x, y, x_query, y_query = episode(head)
    learner = wrap(method, build(head)).clone()
    for _ in range(3):
        learner.adapt(learner(x, y).nll(y))
    average = learner.posterior().predict(x, y, x_query, samples=4)
    assert average.nll(y_query).isfinite()
    torch.manual_seed(1)
    post = learner.posterior(lambda network: network(x, y).nll(y), steps=2)
    torch.manual_seed(2)
    mixed = post.predict(x, y, x_query, samples=2, vectorize=False).log_prob(y_query)
    torch.manual_seed(2)
    parts = [post.network(post.sample())(x, y, x_query).log_prob(y_query) for _ in range(2)]
    assert torch.allclose(mixed.exp(), sum(p.exp() for p in parts) / 2, atol=1e-6)


@every_head
def test_the_order_of_the_support_does_not_matter(head, double):
    model, (x, y, x_query, y_query) = build(head), episode(head)
    order = torch.randperm(len(x))
    for extra in [(), (x_query,), (x_query, y_query)]:
        before, after = seeded_call(model, x, y, *extra), seeded_call(model, x[order], y[order], *extra)
        goal = (y, y[order]) if not extra else (y_query, y_query)
        assert torch.allclose(before.loss(goal[0]), after.loss(goal[1]), atol=1e-10)
        if extra:
            assert torch.allclose(density(before), density(after), atol=1e-10)


@every_classifier
def test_what_the_labels_are_called_does_not_matter(head, double):
    model, (x, y, x_query, y_query) = build(head), episode(head)
    # a linear layer's columns go by the labels' order, as MAML's do; the others know no order at all
    names = torch.tensor([-4, 17, 1000] if head == "linear" else [17, -4, 1000])
    before, after = model(x, y, x_query, y_query), model(x, names[y], x_query, names[y_query])
    assert torch.allclose(before.log_prob(y_query), after.log_prob(names[y_query]), atol=1e-10)
    assert torch.allclose(before.loss(y_query), after.loss(names[y_query]), atol=1e-10)
    assert torch.equal(names[before.mode], after.mode)
    assert set(after.sample((50,)).unique().tolist()) <= set(names.tolist())


@every_head
def test_gradients_are_right_in_float64(head, double):
    model = HEADS[head]()
    parameters = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
    values = [p.requires_grad_() for p in parameters.values()]
    y, y_query = targets(head, 5), targets(head, 3)
    support, query = torch.randn(5, FEATURES, requires_grad=True), torch.randn(3, FEATURES, requires_grad=True)

    def losses(support, query, *values):
        weights = dict(zip(parameters, values))
        torch.manual_seed(1)
        own = functional_call(model, weights, (support, y)).nll(y)
        return own, functional_call(model, weights, (support, y, query, y_query)).loss(y_query)

    assert torch.autograd.gradcheck(losses, (support, query, *values), fast_mode=True)


def stacked_weights(model, copies):
    sources = [model] + [build_like(model) for _ in range(copies - 1)]
    states = [dict(source.named_parameters()) for source in sources]
    return states, {name: torch.stack([s[name].detach() for s in states]) for name in states[0]}


def build_like(model):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return twin


@every_head
def test_vmap_over_weights_equals_a_loop(head, double):
    model, (x, y, x_query, y_query) = build(head), episode(head)
    states, stacked = stacked_weights(model, 3)

    def run(weights):
        own = functional_call(model, weights, (x, y)).nll(y)
        prediction = functional_call(model, weights, (x, y, x_query, y_query))
        return own, density(prediction), prediction.loss(y_query)

    torch.manual_seed(1)
    together = vmap(run, randomness="same")(stacked)
    for i, state in enumerate(states):
        torch.manual_seed(1)
        for a, b in zip(together, run(state)):
            assert torch.allclose(a[i], b, atol=1e-10)


@every_head
def test_vmap_over_episodes_equals_a_loop_and_a_leading_dimension(head, double):
    model, (x, y, x_query, y_query) = build(head), episode(head, 4)
    if head in CLASSIFIERS:
        y = torch.stack([(y[i] * 7 - i)[torch.randperm(7)] for i in range(4)])
        y_query = torch.stack([(y_query[i] * 7 - i)[torch.randperm(6)] for i in range(4)])

    def run(x, y, x_query, y_query):
        prediction = model(x, y, x_query, ways=3)
        return density(prediction), prediction.nll(y_query), model(x, y, ways=3).nll(y)

    torch.manual_seed(1)
    together = vmap(run, randomness="same")(x, y, x_query, y_query)
    for i in range(4):
        torch.manual_seed(1)
        for a, b in zip(together, run(x[i], y[i], x_query[i], y_query[i])):
            assert torch.allclose(a[i], b, atol=1e-10)
    if "latent" not in head and head != "anp":  # a latent is drawn anew for each episode of a batch
        batch = model(x, y, x_query)
        assert torch.allclose(density(batch), together[0], atol=1e-10)
        assert batch.n == 24
        assert torch.allclose(batch.nll(y_query), together[1].mean(), atol=1e-10)
        assert torch.allclose(model(x, y).nll(y), together[2].mean(), atol=1e-10)


@every_head
def test_a_batch_of_episodes_trains(head):
    data = episode(head, 4)
    prediction, trained = run_episode("plain", build(head), data)
    assert prediction.nll(data[3]).isfinite()
    assert prediction.n == 24
    assert all(p.grad.abs().max() > 0 for p in trained.parameters())


@every_head
@pytest.mark.parametrize(("n", "ways"), [(1, 1), (3, 3), (4, 1)], ids=["one-datum", "one-shot", "one-way"])
@pytest.mark.parametrize("method", ["plain", "maml", "niw"])
def test_corners(head, n, ways, method):
    data = episode(head, n=n, m=2, ways=ways)
    prediction, trained = run_episode(method, build(head), data, steps=2)
    assert prediction.nll(data[3]).isfinite()
    assert all(torch.isfinite(p.grad).all() for p in trained.parameters())


@every_classifier
def test_unequal_shots_and_ways(head, double):
    model = build(head)
    x, x_query = torch.randn(2, 6, INPUTS), torch.randn(2, 4, INPUTS)
    y = torch.tensor([[5, 5, 5, 9, 9, 11], [2, 7, 7, 7, 7, 7]])  # three ways, then two
    y_query = torch.tensor([[5, 9, 11, 11], [2, 7, 7, 2]])
    batch = model(x, y, x_query)
    alone = [model(x[i], y[i], x_query[i]) for i in range(2)]
    assert torch.equal(batch.probs[1, :, 2], torch.zeros(4))
    for i in range(2):
        assert torch.allclose(batch.log_prob(y_query)[i], alone[i].log_prob(y_query[i]), atol=1e-10)
    loss = model(x, y, x_query, y_query).loss(y_query)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@every_head
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one-episode", "three-episodes"])
def test_niw_counts_the_examples_of_a_prediction(head, lead):
    """
    n is the number of examples that a loss is about: neither the support's when the query speaks, nor the episodes'.
    After a step it is 2 lr T / variance; in a backward it divides the KL, from which n_0 has its gradient.
    """
    x, y, x_query, y_query = episode(head, *lead)
    niw = NIW(build(head), lr=0.01, temperature=1.0, kl_weight=1.0, second_order="none")
    learner = niw.clone()
    count = 3 if lead else 1
    learner.adapt(learner(x, y).nll(y))
    for variance in learner.posterior().variance.values():
        assert torch.allclose(variance, torch.tensor(2 * 0.01 / (7 * count)))
    learner(x, y, x_query).nll(y_query).backward()
    (expected,) = torch.autograd.grad(learner.kl() / (6 * count), niw.hyper.raw_n0)
    assert torch.allclose(niw.hyper.raw_n0.grad, expected)


@every_head
def test_training_lowers_the_loss(head):
    """Plain training on one fixed batch: a head whose gradient points the wrong way cannot do this."""
    model, (x, y, x_query, y_query) = build(head), episode(head, 8)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = seeded_call(model, x, y, x_query, y_query).loss(y_query)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


@every_head
def test_the_prediction_depends_on_the_support(head):
    model, (x, y, x_query, _) = build(head), episode(head)
    before, after = seeded_call(model, x, y, x_query), seeded_call(model, x + 1.0, y, x_query)
    assert torch.allclose(density(before), density(after)) != model.head.needs_support
