"""
What users of `learn2learn.algorithms.MAML` do, row by row: the same works with NIW.

Most tests hand a habit, a function of the constructor, to the fixture `run`. It runs with MAML, which shows that the
habit is MAML's; with NIW as it comes; and with NIW at temperature 0, which must return MAML's numbers.
"""

import collections
import copy
import dataclasses
import json
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax
from torch.nn.parallel import DistributedDataParallel

from l2l_niw import NIW
from l2l_niw.errors import LossError, ModelError, NIWError

import learn2learn as l2l

LR, WORLD = 0.1, 2
EXACT = {"temperature": 0.0, "second_order": "all", "learn_step_sizes": False}


def maml(model, **options):
    return l2l.algorithms.MAML(model, lr=LR, **options)


def niw(model, **options):
    return NIW(model, lr=LR, **options)


def exact(model, **options):
    return NIW(model, lr=LR, **EXACT, **options)


def last_layer(model, **options):
    return NIW(model, lr=LR, **{**EXACT, "second_order": "last_layer"}, **options)


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def check(habit, make):
    """Runs a habit with one constructor; those that promise MAML's numbers are held to them."""
    torch.manual_seed(0)
    got = habit(make)
    assert all(torch.isfinite(t).all() for t in got)
    if make in (exact, last_layer):
        torch.manual_seed(0)
        expected = habit(maml)
        assert len(got) == len(expected)
        for a, b in zip(got, expected):
            assert torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.fixture(params=[maml, niw, exact], ids=lambda make: make.__name__)
def run(request):
    return lambda habit: check(habit, request.param)


@pytest.fixture(params=[maml, niw, exact, last_layer], ids=lambda make: make.__name__)
def run_head(request):
    """For models in which the linear head is all that adapts: second_order="last_layer" is MAML there."""
    return lambda habit: check(habit, request.param)


def mlp(outputs=2):
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))


def task():
    return torch.randn(5, 3), torch.randint(2, (5,)), torch.randn(7, 3), torch.randint(2, (7,))


def adapted(wrapper, x, y, steps=3):
    learner = wrapper.clone()
    for _ in range(steps):
        learner.adapt(cross_entropy(learner(x), y))
    return learner


def values(module):
    return [p.detach().clone() for p in module.parameters()]


def meta_gradients(model):
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def at_weights(model, weights, x):
    return torch.func.functional_call(model, dict(zip(dict(model.named_parameters()), weights)), (x,))


@pytest.mark.parametrize("where", ["constructor", "clone", "adapt"])
@pytest.mark.parametrize("first_order", [False, True])
def test_steps_and_meta_gradients_of_either_order(run, first_order, where):
    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        order = {"first_order": first_order}
        wrapper = make(model, **(order if where == "constructor" else {}))
        learner = wrapper.clone(**(order if where == "clone" else {}))
        for _ in range(3):
            learner.adapt(cross_entropy(learner(x), y), **(order if where == "adapt" else {}))
        loss = cross_entropy(learner(x_query), y_query)
        loss.backward()
        return [loss.detach(), *values(learner), *meta_gradients(model)]

    run(habit)


def test_every_forward_runs_at_the_learner_s_parameters(run):
    def habit(make):
        model, (x, y, x_query, _) = mlp(), task()
        learner = adapted(make(model), x, y)
        for inputs in (x, x_query, x):
            outputs = learner(inputs)
            assert torch.equal(outputs, at_weights(model, learner.parameters(), inputs))
        assert all(not p.is_leaf and p.grad_fn is not None for p in learner.parameters())
        return [outputs.detach()]

    run(habit)


def test_a_query_by_name_is_the_forward():
    x, y, x_query, _ = task()
    learner = adapted(niw(mlp()), x, y)
    assert torch.equal(learner.query(x_query), learner(x_query))


def test_parameters_are_aligned(run):
    def habit(make):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        wrapper = make(model)
        learner = wrapper.clone()
        names, count = [name for name, _ in model.named_parameters()], len(list(model.parameters()))
        assert [name for name, _ in wrapper.named_parameters()][:count] == [f"module.{name}" for name in names]
        assert [name for name, _ in learner.module.named_parameters()] == names
        assert len(list(learner.parameters())) == count
        for p, mine in zip(wrapper.parameters(), learner.parameters()):
            assert torch.equal(p, mine)
        learner.adapt(learner(torch.randn(4, 3)).square().mean())
        for p, mine in zip(wrapper.parameters(), learner.parameters()):  # Reptile's update
            p.data.add_(0.5 * (mine.data - p.data))
        return values(model)

    run(habit)


def test_the_rest_of_niw_s_parameters_follow_the_model_s():
    wrapper = niw(mlp())
    names = [name.rpartition("hyper.")[-1].split(".")[0] for name, _ in wrapper.named_parameters()]
    assert names == ["module"] * 4 + ["raw_n0"] + ["log_variance"] * 4


class Normal(nn.Module):
    """maml_toy.py's: no inputs, and here a scalar parameter too."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x=None):
        return torch.distributions.Normal(self.mean, self.scale)


@pytest.mark.parametrize("again", [False, True], ids=["outputs from before the step", "new outputs"])
def test_a_model_without_inputs(run, again):
    def habit(make):
        model, target = Normal(), torch.randn(5)
        wrapper, total = make(model), 0.0
        for _ in range(2):
            learner = wrapper.clone()
            proposal = learner()
            learner.adapt((target - proposal.mean).square().sum() + (2 - proposal.variance).square().sum())
            proposal = learner() if again else proposal
            total = total + (target - proposal.mean).square().sum() + (2 - proposal.variance).square().sum()
        total.backward()
        return [*values(learner), *meta_gradients(model)]

    run(habit)


def test_a_scalar_model(run):
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor(0.7))

        def forward(self, x):
            return self.a * x

    def habit(make):
        model = Scalar()
        learner = make(model).clone()
        for _ in range(3):
            learner.adapt((learner(torch.tensor(2.0)) - 1.0).pow(4))
        (learner(torch.tensor(3.0)) - 1.0).pow(4).backward()
        assert learner.a.shape == ()
        return [*values(learner), *meta_gradients(model)]

    run(habit)


def test_anil_s_features_get_their_gradient(run_head):
    def habit(make):
        body, head, (x, y, x_query, y_query) = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, 2), task()
        learner, features, queries = make(head).clone(), body(x), body(x_query)
        for _ in range(3):
            learner.adapt(cross_entropy(learner(features), y))
        cross_entropy(learner(queries), y_query).backward()
        assert all(p.grad.abs().max() > 0 for p in body.parameters())
        return [*meta_gradients(body), *meta_gradients(head)]

    run_head(habit)


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(3, 6))

    def forward(self, x):
        return (x @ self.table).tanh()


class FixedFeatures(nn.Module):
    """A linear head on features that do not learn, so that the last layer is all there is."""

    def __init__(self, head_first=False, output=lambda logits, features: logits):
        super().__init__()
        if head_first:
            self.head, self.body = nn.Linear(6, 2), Projection()
        else:
            self.body, self.head = Projection(), nn.Linear(6, 2)
        self.output = output

    def forward(self, x):
        features = self.body(x)
        return self.output(self.head(features), features)

    def log_prob(self, x, y):
        return torch.distributions.Categorical(logits=self.head(self.body(x))).log_prob(y)


OUTPUTS = {
    "logits": (lambda logits, _: logits, cross_entropy),
    "log_softmax": (lambda logits, _: log_softmax(logits, -1), nn.functional.nll_loss),
    "tuple": (lambda logits, features: (logits, features), lambda outputs, y: cross_entropy(outputs[0], y)),
    "dict": (lambda logits, _: {"logits": logits}, lambda outputs, y: cross_entropy(outputs["logits"], y)),
    "view": (lambda logits, _: logits.view(-1, 1, 2), lambda outputs, y: cross_entropy(outputs[:, 0], y)),
    "part": (lambda logits, _: logits[..., :1], lambda outputs, y: (outputs[:, 0] - y).square().mean()),
    "loss": (lambda logits, _: logits.square().mean(), lambda outputs, y: outputs),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_whatever_a_model_returns_the_head_is_of_second_order(run_head, output):
    returned, loss = OUTPUTS[output]

    def habit(make):
        model, (x, y, x_query, y_query) = FixedFeatures(output=returned), task()
        learner = make(model).clone()
        for _ in range(3):
            learner.adapt(loss(learner(x), y))
        loss(learner(x_query), y_query).backward()
        return [*values(learner), *meta_gradients(model)]

    run_head(habit)


LOSSES = {
    "L2 term": lambda model, x, y: cross_entropy(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters()),
    "L2 term by name": lambda model, x, y: cross_entropy(model(x), y) + 0.1 * model.head.weight.square().sum(),
    "two forwards": lambda model, x, y: cross_entropy(model(x), y) + (model(x + 1) - model(x)).square().mean(),
    "forwards of one example": lambda model, x, y: sum(cross_entropy(model(a[None]), b[None]) for a, b in zip(x, y)),
    "norm": lambda model, x, y: model(x).norm(),
    "variance over the batch": lambda model, x, y: model(x).var(0).log().sum(),
    "contrastive": lambda model, x, y: cross_entropy(model(x) @ model(x + 0.1).T, torch.arange(len(x))),
    "another method": lambda model, x, y: -model.log_prob(x, y).mean(),
    "a layer alone": lambda model, x, y: cross_entropy(model.head(model.body(x)), y),
    "sum": lambda model, x, y: cross_entropy(model(x), y, reduction="sum"),
}


@pytest.mark.parametrize("head_first", [False, True], ids=["head last", "head first"])
@pytest.mark.parametrize("name", LOSSES)
def test_whatever_the_loss_the_head_is_of_second_order(run_head, name, head_first):
    loss = LOSSES[name]

    def habit(make):
        model, (x, y, x_query, y_query) = FixedFeatures(head_first), task()
        learner = make(model).clone()
        for _ in range(3):
            learner.adapt(loss(learner, x, y))
        loss(learner, x_query, y_query).backward()
        return [*values(learner), *meta_gradients(model)]

    run_head(habit)


def test_every_forward_of_a_loss_counts_its_examples():
    model, x, y, got = mlp(), torch.randn(10, 3), torch.randint(2, (10,)), []
    for n in (None, 10):
        torch.manual_seed(1)
        learner = niw(model, temperature=1.0).clone()
        learner.adapt(sum(cross_entropy(learner(a[None]), b[None]) for a, b in zip(x, y)) / 10, n=n)
        got.append(torch.cat([p.flatten() for p in learner.parameters()]))
    assert torch.equal(*got)


def test_a_look_at_the_support_before_backward_changes_no_gradient():
    x, y, x_query, y_query = task()
    model, got = mlp(), []
    for look in (False, True):
        torch.manual_seed(1)
        wrapper = niw(model, temperature=0.01)
        learner = adapted(wrapper, x, y)
        loss = cross_entropy(learner(x_query), y_query)
        if look:
            with torch.no_grad():
                learner(x[:2])
        model.zero_grad()
        loss.backward()
        got.append(torch.cat([g.flatten() for g in meta_gradients(wrapper)]))
    assert torch.equal(*got)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Shared(nn.Module):
    """One layer reached by two paths, and a weight tied by hand."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.again = nn.Sequential(self.first, nn.Tanh())
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.head(self.tied(self.again(self.first(x))))


@pytest.mark.parametrize(("network", "length"), [(Recurrent, 4), (Shared, None)])
def test_recurrent_networks_and_shared_parameters(run, network, length):
    """learn2learn's issues 139 and 174."""

    def habit(make):
        model, (_, y, _, y_query) = network(), task()
        shape = (3,) if length is None else (length, 3)
        learner = adapted(make(model), torch.randn(5, *shape), y)
        if network is Shared:
            assert learner.module.tied.weight is learner.module.first.weight is learner.module.again[0].weight
        cross_entropy(learner(torch.randn(7, *shape)), y_query).backward()
        return [*values(learner), *meta_gradients(model)]

    run(habit)


@pytest.mark.parametrize("where", ["constructor", "clone", "adapt"])
@pytest.mark.parametrize("frozen", [0, 2])
def test_frozen_layers(run, frozen, where):
    """learn2learn's issues 271 and 363."""

    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        model[frozen].requires_grad_(False)
        before, grant = values(model[frozen]), {"allow_nograd": True}
        learner = make(model, **(grant if where == "constructor" else {})).clone(**(grant if where == "clone" else {}))
        for _ in range(3):
            learner.adapt(cross_entropy(learner(x), y), **(grant if where == "adapt" else {}))
        cross_entropy(learner(x_query), y_query).backward()
        assert all(torch.equal(a, b) for a, b in zip(values(learner.module[frozen]), before))
        assert all(p.grad is None for p in model[frozen].parameters())
        return [*values(learner), *meta_gradients(model)]

    run(habit)


@pytest.mark.parametrize("where", ["constructor", "clone", "adapt"])
def test_unused_layers(run, where):
    def habit(make):
        model, (x, _, x_query, y_query) = mlp(), task()
        grant = {"allow_unused": True}
        learner = make(model, **(grant if where == "constructor" else {})).clone(**(grant if where == "clone" else {}))
        for _ in range(3):
            learner.adapt(learner.module[0](x).square().mean(), **(grant if where == "adapt" else {}))
        assert all(torch.equal(a, b) for a, b in zip(values(learner.module[2]), values(model[2])))
        cross_entropy(learner(x_query), y_query).backward()
        return [*values(learner), *meta_gradients(model)]

    run(habit)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batchnorm_s_statistics(run, training):
    """learn2learn's issue 207: they are the model's own, which evaluation leaves alone."""

    def habit(make):
        model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
        x, y, x_query, y_query = task()
        wrapper = make(model).train(training)
        cross_entropy(adapted(wrapper, x, y)(x_query), y_query).backward()
        assert model[1].num_batches_tracked == (4 if training else 0)
        return [model[1].running_mean.clone(), model[1].running_var.clone(), *meta_gradients(model)]

    run(habit)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str = "batch"


class Reader(nn.Module):
    """A network that unpacks its inputs itself."""

    def __init__(self, unpack):
        super().__init__()
        self.unpack, self.layers = unpack, mlp()

    def forward(self, batch):
        return self.layers(self.unpack(batch))


def nested_tensor(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        return torch.nested.nested_tensor([row[None] for row in x], dtype=x.dtype)


INPUTS = {
    "dataclass": (Batch, lambda batch: batch.x),
    "UserDict": (lambda x: collections.UserDict(x=x), lambda batch: batch["x"]),
    "numpy": (lambda x: x.numpy(), torch.tensor),
    "sparse": (lambda x: x.to_sparse(), lambda batch: batch.to_dense()),
    "nested lists": (lambda x: [list(row) for row in x], lambda rows: torch.stack([torch.stack(r) for r in rows])),
    "numbers": (lambda x: x.tolist(), torch.tensor),
    "nested tensor": (nested_tensor, lambda batch: batch.to_padded_tensor(0.0)[:, 0]),
    "text": (lambda x: json.dumps(x.tolist()), lambda text: torch.tensor(json.loads(text))),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_any_kind(run, kind):
    pack, unpack = INPUTS[kind]

    def habit(make):
        model, (x, y, x_query, y_query) = Reader(unpack), task()
        support, query = pack(x), pack(x_query)
        learner = adapted(make(model), support, y)
        outputs = learner(query)
        assert torch.equal(outputs, at_weights(model.layers, learner.parameters(), x_query))
        cross_entropy(outputs, y_query).backward()
        return [*values(learner), *meta_gradients(model)]

    run(habit)


def test_a_buffer_that_is_filled_anew_is_a_new_input(run):
    def habit(make):
        model, (x, y, x_query, _) = Reader(torch.tensor), task()
        buffer = x.numpy().copy()
        learner = adapted(make(model), buffer, y)
        buffer[:] = x_query[:5].numpy()
        outputs = learner(buffer)
        assert torch.equal(outputs, at_weights(model.layers, learner.parameters(), x_query[:5]))
        return [outputs.detach()]

    run(habit)


def test_the_learning_rate_is_read_and_written(run):
    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        wrapper = make(model)
        learner = wrapper.clone()
        assert wrapper.lr == learner.lr == LR
        learner.adapt(cross_entropy(learner(x), y))
        learner.lr = 0.5
        learner.adapt(cross_entropy(learner(x), y))
        assert (wrapper.lr, learner.lr) == (LR, 0.5)
        cross_entropy(learner(x_query), y_query).backward()
        wrapper.lr = 0.3
        assert wrapper.clone().lr == 0.3
        return [*values(learner), *values(adapted(wrapper, x, y)), *meta_gradients(model)]

    run(habit)


@pytest.mark.parametrize("target", ["learner", "module"])
def test_maml_update(run, target):
    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        learner = make(model).clone()
        for _ in range(2):
            loss = cross_entropy(learner(x), y)
            gradients = torch.autograd.grad(loss, list(learner.parameters()), create_graph=True)
            expected = [p - 0.2 * g for p, g in zip(learner.parameters(), gradients)]
            updated = learner if target == "learner" else learner.module
            assert l2l.algorithms.maml_update(updated, 0.2, gradients) is updated
            assert all(torch.equal(p, e) for p, e in zip(learner.parameters(), expected))
        learner.adapt(cross_entropy(learner(x), y))
        cross_entropy(learner(x_query), y_query).backward()
        return [*values(learner), *meta_gradients(model)]

    run(habit)


def write_data(learner, new):
    for p, v in zip(learner.parameters(), new):
        p.data.copy_(v)


def set_data(learner, new):
    for p, v in zip(learner.parameters(), new):
        p.data = v.clone()


def write_in_place(learner, new):
    with torch.no_grad():
        for p, v in zip(learner.parameters(), new):
            p.zero_().add_(v)


def load_into_module(learner, new):
    learner.module.load_state_dict(dict(zip(learner.module.state_dict(), new)))


def load_into_learner(learner, new):
    learner.load_state_dict(dict(zip(learner.state_dict(), new)))


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "write", [write_data, set_data, write_in_place, load_into_module, load_into_learner], ids=lambda f: f.__name__
)
def test_weights_written_on_a_clone_are_those_that_adapt(run, write, steps_before):
    def habit(make):
        model, other, (x, y, x_query, y_query) = mlp(), mlp(), task()
        before = values(model)
        learner = adapted(make(model), x, y, steps_before)
        write(learner, values(other))
        assert torch.equal(learner(x), other(x))
        assert all(torch.equal(a, b) for a, b in zip(values(model), before))
        learner.adapt(cross_entropy(learner(x), y))
        cross_entropy(learner(x_query), y_query).backward()
        step = torch.autograd.grad(cross_entropy(other(x), y), list(other.parameters()))
        for p, start, g in zip(learner.parameters(), other.parameters(), step):
            assert torch.allclose(p, start - LR * g, atol=0.05)
        return [*values(learner), *meta_gradients(model)]

    run(habit)


def detach_each(learner):
    for p in learner.parameters():
        p.detach_().requires_grad_()


DETACH = {
    "p.detach_()": detach_each,
    "detach_module(learner)": lambda learner: l2l.detach_module(learner, keep_requires_grad=True),
    "detach_module(learner.module)": lambda learner: l2l.detach_module(learner.module, keep_requires_grad=True),
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("how", DETACH)
def test_a_detached_learner_keeps_its_weights_and_adapts(run, how, steps_before):
    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        learner = adapted(make(model), x, y, steps_before)
        before = values(learner)
        DETACH[how](learner)
        assert all(p.is_leaf and p.requires_grad for p in learner.parameters())
        assert all(torch.equal(a, b) for a, b in zip(values(learner), before))
        leaves = list(learner.parameters())
        learner.adapt(cross_entropy(learner(x), y))
        cross_entropy(learner(x_query), y_query).backward()
        assert all(p.grad.abs().max() > 0 for p in leaves)
        return [*values(learner), *(p.grad for p in leaves), *meta_gradients(model)]

    run(habit)


def test_detach_module_stops_gradients(run):
    def habit(make):
        x, y, x_query, _ = task()
        learner = adapted(make(mlp()), x, y)
        l2l.detach_module(learner)
        outputs = learner(x_query)
        assert not outputs.requires_grad
        return [outputs]

    run(habit)


def test_the_wrapper_adapts_too(run):
    def habit(make):
        model, (x, y, x_query, _) = mlp(), task()
        wrapper, before = make(model), values(model)
        for _ in range(2):
            wrapper.adapt(cross_entropy(wrapper(x), y))
        assert all(not torch.equal(p, b) for p, b in zip(wrapper.module.parameters(), before))
        assert torch.equal(wrapper(x_query), wrapper.module(x_query))
        return values(wrapper.module)

    run(habit)


def test_promp_s_deep_copies_of_the_wrapper(run):
    """examples/rl/promp.py: copies adapt by first-order steps, are detached and copied again."""

    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        wrapper, before = make(model), values(model)
        worker, old = copy.deepcopy(wrapper), []
        for _ in range(3):
            for p in worker.parameters():
                p.detach_().requires_grad_()
            old.append(copy.deepcopy(worker))
            worker.adapt(cross_entropy(worker(x), y), first_order=True)
        assert all(torch.equal(a, b) for a, b in zip(values(model), before))
        learner = wrapper.clone()
        for each in old:
            loss = (learner(x) - each(x).detach()).square().mean() + cross_entropy(learner(x), y)
            learner.adapt(loss)
        cross_entropy(learner(x_query), y_query).backward(retain_graph=True)
        return [t for each in (*old, worker) for t in values(each.module)] + meta_gradients(model)

    run(habit)


def test_an_adapted_learner_is_pickled(run):
    def habit(make):
        x, y, x_query, _ = task()
        learner = adapted(make(mlp()), x, y)
        twin = pickle.loads(pickle.dumps(learner))
        assert torch.equal(twin(x_query), learner(x_query))
        before = values(learner)
        twin.adapt(cross_entropy(twin(x), y))
        assert all(torch.equal(a, b) for a, b in zip(values(learner), before))
        assert not torch.equal(twin(x_query), learner(x_query))
        return values(twin)

    run(habit)


def test_an_adapted_learner_is_deep_copied():
    x, y, x_query, _ = task()
    learner = adapted(niw(mlp()), x, y)
    before, twin = values(learner), copy.deepcopy(learner)
    assert torch.equal(twin(x_query), learner(x_query))
    twin.adapt(cross_entropy(twin(x), y))
    assert all(torch.equal(a, b) for a, b in zip(values(learner), before))
    assert not torch.equal(twin(x_query), learner(x_query))
    learner.adapt(cross_entropy(learner(x), y))


def test_a_wrapper_is_pickled_after_an_episode(run):
    def habit(make):
        x, y, x_query, y_query = task()
        wrapper = make(mlp())
        cross_entropy(adapted(wrapper, x, y)(x_query), y_query).backward()
        twin = pickle.loads(pickle.dumps(wrapper))
        assert torch.equal(twin(x), wrapper(x))
        return values(adapted(twin, x, y))

    run(habit)


def test_a_head_of_the_same_shape_may_replace_the_model_s(run):
    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        wrapper = make(model)
        adapted(wrapper, x, y)
        model[2] = nn.Linear(6, 2)
        learner = wrapper.clone()
        assert torch.equal(learner(x), model(x))
        cross_entropy(adapted(wrapper, x, y)(x_query), y_query).backward()
        return meta_gradients(model)

    run(habit)


def test_another_head_on_the_model_says_to_wrap_it_again():
    wrapper = niw(mlp())
    wrapper.module[2] = nn.Linear(6, 4)
    with pytest.raises(ModelError, match=r"'2\.weight'.*wrap"):
        wrapper.clone()


def test_another_head_on_a_clone_adapts_or_is_named(run):
    def habit(make):
        x, _, x_query, _ = task()
        learner = make(mlp()).clone()
        learner.module[2] = nn.Linear(6, 4)
        try:
            learner.adapt(cross_entropy(learner(x), torch.randint(4, (5,))))
        except NIWError as error:
            if make is maml or "2.weight" not in str(error):
                raise
            pytest.skip("refused by name")
        assert learner(x_query).shape == (7, 4)
        return values(learner)

    run(habit)


def test_the_support_s_loss_may_join_the_outer_loss(run):
    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        learner, losses = make(model).clone(), []
        for _ in range(3):
            losses.append(cross_entropy(learner(x), y))
            learner.adapt(losses[-1])
        outer = cross_entropy(learner(x_query), y_query)
        (outer + sum(losses)).backward()
        return meta_gradients(model)

    run(habit)


@pytest.mark.parametrize("second_order", ["none", "last_layer", "all"])
def test_the_first_support_loss_brings_the_model_s_own_gradient(second_order):
    model, (x, y, x_query, y_query) = mlp(), task()
    expected = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    got = []
    for share in (0.0, 1.0):
        torch.manual_seed(1)
        model.zero_grad()
        learner = niw(model, kl_weight=0.0, second_order=second_order).clone()
        support = cross_entropy(learner(x), y)
        learner.adapt(support)
        (cross_entropy(learner(x_query), y_query) + share * support).backward()
        got.append(meta_gradients(model))
    for without, joined, g in zip(*got, expected):
        assert torch.allclose(joined - without, g, atol=1e-12)


def test_a_loss_may_be_differentiated_twice(run):
    """TRPO's Hessian-vector products."""

    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        loss = cross_entropy(adapted(make(model), x, y)(x_query), y_query)
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        directions = [torch.randn_like(p) for p in parameters]
        product = sum((g * v).sum() for g, v in zip(gradients, directions))
        once = torch.autograd.grad(product, parameters, retain_graph=True)
        again = torch.autograd.grad(product, parameters)
        assert all(torch.equal(a, b) for a, b in zip(once, again))
        return [*(g.detach() for g in gradients), *once]

    run(habit)


def test_both_derivatives_in_all_of_l0_are_those_of_finite_differences():
    model, (x, y, x_query, y_query) = mlp(), task()
    wrapper = niw(model, temperature=0.01, second_order="all", kl_weight=0.0)
    parameters = list(wrapper.parameters())
    directions = [torch.randn_like(p) for p in parameters]

    def loss():
        torch.manual_seed(1)
        return cross_entropy(adapted(wrapper, x, y)(x_query), y_query)

    def gradient(create_graph=False):
        found = torch.autograd.grad(loss(), parameters, create_graph=create_graph, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]

    def along(function, step=1e-5):
        ends = []
        for sign in (1, -2, 1):
            with torch.no_grad():
                for p, v in zip(parameters, directions):
                    p.add_(sign * step * v)
            ends.append(function())
        return [(a - b) / (2 * step) for a, b in zip(ends[0], ends[1])]

    gradients = gradient(create_graph=True)
    product = sum((g * v).sum() for g, v in zip(gradients, directions))
    assert torch.allclose(product, along(lambda: [loss().detach()])[0], rtol=1e-6, atol=1e-9)
    second = torch.autograd.grad(product, parameters, allow_unused=True)
    for p, got, expected in zip(parameters, second, along(gradient)):
        assert torch.allclose(torch.zeros_like(p) if got is None else got, expected, rtol=1e-5, atol=1e-8)


def test_a_query_s_gradient_in_the_learner_s_parameters(run):
    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        learner = adapted(make(model), x, y)
        got = torch.autograd.grad(cross_entropy(learner(x_query), y_query), list(learner.parameters()))
        weights = [v.requires_grad_() for v in values(learner)]
        expected = torch.autograd.grad(cross_entropy(at_weights(model, weights, x_query), y_query), weights)
        for a, b in zip(got, expected):
            assert torch.allclose(a, b, atol=1e-12)
        return got

    run(habit)


def test_an_outer_step_goes_through_inner_clones(run):
    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        outer = make(model).clone()
        for _ in range(2):
            inner = outer.clone()
            assert torch.equal(inner(x), outer(x))
            inner.adapt(cross_entropy(inner(x), y))
            assert not torch.equal(inner(x), outer(x))
            outer.adapt(cross_entropy(inner(x + 1), y))
        cross_entropy(outer(x_query), y_query).backward()
        return [*values(inner), *values(outer), *meta_gradients(model)]

    run(habit)


def test_a_step_s_parameters_may_be_differentiated_in_the_model_s(run):
    def habit(make):
        model, (x, y, _, _) = mlp(), task()
        learner = adapted(make(model), x, y)
        return torch.autograd.grad(sum(p.square().sum() for p in learner.parameters()), list(model.parameters()))

    run(habit)


def meta_train(wrapper, opt, iterations=5, tasks=1):
    for _ in range(iterations):
        opt.zero_grad()
        for _ in range(tasks):
            x, y, x_query, y_query = task()
            cross_entropy(adapted(wrapper, x, y)(x_query), y_query).backward()
        opt.step()


def test_an_optimiser_over_the_model_s_parameters_trains_the_model(run):
    """examples/rl/maml_dice.py: Adam(policy.parameters())."""

    def habit(make):
        model = mlp()
        before = values(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            meta_train(make(model), torch.optim.Adam(model.parameters(), 0.01))
        assert all(not torch.equal(a, b) for a, b in zip(values(model), before))
        return values(model)

    run(habit)


def test_an_optimiser_that_leaves_v0_out_is_told():
    wrapper = niw(mlp())
    with pytest.warns(UserWarning, match="log_variance|V_0"):
        meta_train(wrapper, torch.optim.Adam(wrapper.module.parameters(), 0.01))


@pytest.mark.parametrize("tasks", [1, 8])
def test_an_optimiser_over_all_parameters_is_told_nothing(tasks):
    """Nor is one that steps after many tasks, whose gradients accumulate meanwhile."""
    wrapper = niw(mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meta_train(wrapper, torch.optim.Adam(wrapper.parameters(), 0.01), iterations=4, tasks=tasks)


def test_plain_forwards_run_in_inference_mode(run):
    def habit(make):
        model, (x, y, x_query, y_query) = mlp(), task()
        wrapper = make(model)
        learner = adapted(wrapper, x, y)
        with torch.inference_mode():
            outputs = learner(x_query)
            assert torch.equal(wrapper(x), model(x))
            assert torch.equal(wrapper.clone()(x), model(x))
        loss = cross_entropy(learner(x_query), y_query)
        assert torch.equal(outputs, learner(x_query))
        loss.backward()
        return [outputs.clone(), *meta_gradients(model)]

    run(habit)


def test_adapt_in_inference_mode_says_so():
    x, y, x_query, _ = task()
    wrapper = niw(mlp())
    with torch.inference_mode():
        learner = wrapper.clone()
        with pytest.raises(LossError, match="inference_mode"):
            learner.adapt(cross_entropy(learner(x), y))
    learner = adapted(wrapper, x, y)
    assert torch.isfinite(learner(x_query)).all()


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled",
    [lambda model: torch.compile(model, backend="eager"), compiled_in_place],
    ids=["torch.compile(model)", "model.compile()"],
)
def test_a_compiled_model_is_refused_by_name(compiled):
    x, y, _, _ = task()
    with pytest.raises(ModelError, match=r"torch\.compile"):
        adapted(niw(compiled(mlp())), x, y)


class Episode(nn.Module):
    """A whole episode as one forward, so that DDP around the wrapper sees it begin and end."""

    def __init__(self, wrapper):
        super().__init__()
        self.wrapper = wrapper

    def forward(self, x, y, x_query, y_query):
        return cross_entropy(adapted(self.wrapper, x, y)(x_query), y_query)


def gradients_of_tasks(make, tasks, ddp=None):
    """The gradients of all of L_0, averaged over tasks, whichever the process; `ddp` says what DDP wraps."""
    torch.manual_seed(0)
    model = mlp()
    wrapper = make(DistributedDataParallel(model) if ddp == "inside" else model)
    episode = DistributedDataParallel(Episode(wrapper)) if ddp == "around" else Episode(wrapper)
    found = []
    for number in tasks:
        torch.manual_seed(100 + number)
        wrapper.zero_grad()
        episode(*task()).backward()
        found.append([p.grad.clone() for p in wrapper.parameters()])
    return [sum(parts) / len(tasks) for parts in zip(*found)]


def work(rank, folder, make, ddp):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.save(gradients_of_tasks(make, [rank], ddp), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ddp", ["inside", "around"])
@pytest.mark.parametrize("make", [maml, niw], ids=lambda make: make.__name__)
def test_ddp_averages_all_gradients(make, ddp, tmp_path):
    """learn2learn's issues 128, 170, 197, 263 and 272; with NIW also V_0's and n_0's."""
    torch.multiprocessing.spawn(work, args=(str(tmp_path), make, ddp), nprocs=WORLD)
    expected = gradients_of_tasks(make, range(WORLD))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    for first, second, alone in zip(*ranks, expected):
        assert torch.equal(first, second)
        assert torch.allclose(first, alone, rtol=1e-10, atol=1e-12)
