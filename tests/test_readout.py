"""What a readout's steps owe to L_0: MAML's and ANIL's second derivatives."""

import copy
import warnings

import learn2learn as l2l
import pytest
import torch
import torch.utils.checkpoint
from readout_cases import LR, STEPS, ByName, Softened, assert_close, gradients, network, run, task
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW
from l2l_niw.episodes import Episodes
from l2l_niw.learner import NIWLearner


@pytest.fixture(autouse=True)
def in_double(double):
    pass


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"burn_in": 2}, {"temperature": 1e-20, "curvature": "ggn", "prior_precision": 1e-6}]
)
def test_of_a_linear_model_the_gradient_is_maml_s(bias, options):
    model, data = nn.Linear(6, 3, bias=bias), task()
    niw = NIW(model, LR, precondition=False, kl_weight=0.0, **{"temperature": 0.0, **options})
    expected = run(l2l.algorithms.MAML(copy.deepcopy(model), LR), data)
    assert_close(run(niw, data)[: 1 + bias], expected, 1e-8 if "curvature" in options else 1e-10)


@pytest.mark.parametrize("bias", [True, False])
def test_where_the_body_stays_the_gradient_is_anil_s(bias):
    model, (x, y, x_query, y_query) = network(bias), task()
    niw = NIW(model, LR, temperature=0.0)
    with torch.no_grad():
        for v in list(niw.log_variance)[:2]:
            v.sub_(60.0)
    found = run(niw, (x, y, x_query, y_query))[: 3 + bias]
    body, readout = copy.deepcopy(model[:2]), copy.deepcopy(model[2])
    learner = l2l.algorithms.MAML(readout, LR).clone()
    features = body(x)
    for _ in range(STEPS):
        learner.adapt(F.cross_entropy(learner(features), y))
    F.cross_entropy(learner(body(x_query)), y_query).backward()
    assert_close(found, [p.grad for p in (*body.parameters(), *readout.parameters())])


@pytest.mark.parametrize("burn_in", [None, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_gradients_are_those_of_the_chain_written_out(burn_in, temperature):
    """autograd through all steps of a linear model, with the noise that they had."""
    model, data = nn.Linear(6, 3), task()
    x, y, x_query, y_query = data
    niw = NIW(model, LR, temperature=temperature, burn_in=burn_in, prior_precision=20.0, kl_weight=0.0)
    with torch.no_grad():
        for v in niw.log_variance:
            v.add_(0.3 * torch.randn_like(v))
    iterates = []

    def adapt(learner, x, y, i):
        learner.adapt(F.cross_entropy(learner(x), y))
        iterates.append([p.detach() for p in learner.parameters()])

    found = run(niw, data, adapt)
    m0 = [p.detach().clone().requires_grad_() for p in model.parameters()]
    log_variance = [v.detach().clone().requires_grad_() for v in niw.log_variance]
    sizes = [(v - niw.log_start).exp() for v in log_variance]
    theta, chain = m0, []
    for values in iterates:
        slopes = torch.autograd.grad(F.cross_entropy(F.linear(x, *theta), y), theta, create_graph=True)
        moved = [t - LR * s * g for t, s, g in zip(theta, sizes, slopes)]
        theta = [m + (v - m).detach() for m, v in zip(moved, values)]
        chain.append(theta)
    kept = chain[burn_in:] if burn_in else chain[-1:]
    drawn = []
    for k in range(2):
        each = torch.stack([theta[k] for theta in kept])
        mean, p0 = each.mean(0), (-log_variance[k]).exp()
        if temperature:
            noise = 2 * LR * temperature / len(y) * sizes[k].detach()
            a = len(kept) / ((each - mean).square().sum(0).detach() + noise)
            share = a / (a + p0)
        else:
            share = torch.ones_like(p0)
        drawn.append(m0[k] + share * (mean - m0[k]) + share.sqrt() * (kept[-1][k] - mean))
    value = F.cross_entropy(F.linear(x_query, *drawn), y_query)
    expected = torch.autograd.grad(value, [*m0, *log_variance])
    assert_close(found[:2], expected[:2])
    if not temperature:  # noise is taken to grow as steps do, which is not quite so
        assert_close(found[2:4], expected[2:])


def test_it_is_nearer_to_maml_s_gradient_than_a_first_order_one():
    near, far = [], []
    for seed in range(5):
        torch.manual_seed(seed)
        model, data = network(), task()
        exact = torch.cat([g.flatten() for g in run(l2l.algorithms.MAML(copy.deepcopy(model), LR), data)])
        for angles, first_order in ((near, False), (far, True)):
            niw = NIW(model, LR, first_order, temperature=0.0, precondition=False)
            own = torch.cat([g.flatten() for g in run(niw, data)[:4]])
            angles.append(F.cosine_similarity(own, exact, 0))
    assert all(a > b for a, b in zip(near, far))
    assert min(near) > 0.9


def test_steps_on_other_numbers_of_data():
    def adapt(learner, x, y, i):
        n = 9 if i < 2 else 6
        learner.adapt(F.cross_entropy(learner(x[:n]), y[:n]))

    assert all(g.isfinite().all() for g in run(NIW(network(), LR), task(), adapt))


def test_one_datum_by_itself():
    model, (x, y, x_query, y_query) = nn.Linear(6, 3), task()

    def adapt(learner, x, y, i):
        learner.adapt(F.cross_entropy(learner(x[0]), y[0]), **({"n": 1} if isinstance(learner, NIWLearner) else {}))

    niw = NIW(model, LR, temperature=0.0, precondition=False)
    data = (x, y, x_query, y_query)
    assert_close(run(niw, data, adapt)[:2], run(l2l.algorithms.MAML(copy.deepcopy(model), LR), data, adapt))


def test_predictions_on_the_way_change_nothing():
    model, data = network(), task()

    def adapt(learner, x, y, i):
        learner.adapt(F.cross_entropy(learner(x), y))
        with torch.random.fork_rng():
            learner.posterior().predict(x, samples=2, together=False)
            learner.posterior(lambda net: F.cross_entropy(net(x), y), steps=2)
            learner.module(x)

    found = []
    for steps in (adapt, None):
        torch.manual_seed(3)
        found.append(run(NIW(model, LR), data, steps))
    assert_close(*found)


class Checkpointed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers[2](torch.utils.checkpoint.checkpoint(self.layers[:2], x, use_reentrant=False))


def test_a_body_that_is_computed_anew_has_its_own_weights():
    model, data = network(), task()
    found = [run(NIW(m, LR, temperature=0.0), data) for m in (model, Checkpointed(model))]
    assert_close(*found)


class Shaped(nn.Module):
    """It asks its last layer something."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.body(x)).reshape(-1, self.last.in_features))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.body(x.unflatten(-1, (3, 2)))[0][:, -1])


def cross_entropy(net, x, y):
    return F.cross_entropy(net(x), y)


def centred_loss(net, x, y):
    outputs = net(x)
    return (outputs - outputs.mean(0) - torch.eye(3)[y]).square().mean()


@pytest.mark.parametrize("loss", [cross_entropy, centred_loss])
@pytest.mark.parametrize(
    ("make", "warns"),
    [(network, None), (Recurrent, None), (ByName, None), (Softened, None), (Shaped, "its last layer"),
     (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.ReLU(inplace=True)), None)],
)  # fmt: skip
def test_episodes_side_by_side_have_the_loop_s_gradient(make, warns, loss):
    model, tasks = make(), [task() for _ in range(3)]
    niw = NIW(model, LR, temperature=0.0)
    support, query = ([torch.stack(t) for t in zip(*(task[k : k + 2] for task in tasks))] for k in (0, 2))
    expects = pytest.warns(UserWarning, match=warns) if warns and loss is cross_entropy else warnings.catch_warnings()
    with expects:
        if not warns:
            warnings.simplefilter("error")
        Episodes(niw, loss, steps=3)(support, query).backward()
    found = gradients(niw)
    niw.zero_grad()
    for x, y, x_query, y_query in tasks:
        learner = niw.clone()
        for _ in range(3):
            learner.adapt(loss(learner, x, y))
        (loss(learner, x_query, y_query) / 3).backward()
    assert_close(found, gradients(niw))


def test_a_query_after_every_step_has_its_own_gradient():
    model, data = network(), task()
    x, y, x_query, y_query = data
    niw = NIW(model, LR, temperature=0.0)
    learner, losses = niw.clone(), []
    for _ in range(3):
        learner.adapt(F.cross_entropy(learner(x), y))
        losses.append(F.cross_entropy(learner(x_query), y_query))
    sum(losses).backward()
    found = gradients(niw)
    each = [run(niw, data, steps=steps) for steps in (1, 2, 3)]
    assert_close(found, [sum(parts) for parts in zip(*each)])


def test_a_cloned_learner_goes_on_with_the_readout_s_steps():
    model, data = network(), task()
    x, y, x_query, y_query = data
    niw = NIW(model, LR, temperature=0.0)
    learner = niw.clone()
    for _ in range(2):
        learner.adapt(F.cross_entropy(learner(x), y))
    twin = learner.clone()
    for _ in range(STEPS - 2):
        twin.adapt(F.cross_entropy(twin(x), y))
    F.cross_entropy(twin(x_query), y_query).backward()
    found = gradients(niw)
    assert_close(found, run(niw, data))


def test_outputs_of_more_dimensions():
    model = network()
    data = torch.randn(3, 3, 6), torch.randn(3, 3, 3), torch.randn(5, 6), torch.randn(5, 3)
    found = []
    for reshape in (False, True):
        x, y = (t.reshape(9, -1) if reshape else t for t in data[:2])
        niw = NIW(copy.deepcopy(model), LR, temperature=0.0)
        learner = niw.clone()
        for _ in range(3):
            learner.adapt(F.mse_loss(learner(x), y))
        F.mse_loss(learner(data[2]), data[3]).backward()
        found.append([p.grad for p in niw.parameters()])
    assert_close(*found)
