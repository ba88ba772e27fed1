"""second_order='last_layer': the last linear layer's steps keep their graph, as MAML's and ANIL's do."""

import copy
import warnings

import learn2learn as l2l
import pytest
import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.nn import functional as F

from l2l_niw import NIW
from l2l_niw.errors import LossError

STEPS, LR = 4, 0.4


@pytest.fixture(autouse=True)
def in_double(double):
    pass


def network(bias=True):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=bias))


def task():
    return torch.randn(9, 6), torch.arange(9) % 3, torch.randn(15, 6), torch.arange(15) % 3


def wrapper(model, **options):
    return NIW(model, **{"lr": LR, "temperature": 0.0, "learn_step_sizes": False, **options})


def cross_entropy(net, x, y):
    return F.cross_entropy(net(x), y)


def run(wrapped, data, loss=cross_entropy, steps=STEPS, adapt=None, **clone):
    """The gradients of a wrapper's parameters after an episode."""
    x, y, x_query, y_query = data
    wrapped.zero_grad()
    learner = wrapped.clone(**clone)
    for i in range(steps):
        if adapt is None:
            learner.adapt(loss(learner, x, y))
        else:
            adapt(learner, x, y, i)
    loss(learner, x_query, y_query).backward()
    return [p.grad.clone() for p in wrapped.parameters() if p.requires_grad]


def assert_close(found, expected, tolerance=1e-10):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert (a - b).abs().max() < tolerance


def distance(found, other):
    return max((a - b).abs().max() for a, b in zip(found, other))


class Softened(nn.Module):
    """Its outputs are not its last layer's."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.body(x)).log_softmax(-1)


class Backwards(nn.Module):
    """The layer that was registered last comes first; an activation follows the last one."""

    def __init__(self):
        super().__init__()
        self.last, self.body = nn.Linear(8, 3), nn.Sequential(nn.Linear(6, 8), nn.Tanh())

    def forward(self, x):
        return 2 * torch.sin(self.last(self.body(x)))


class Asked(nn.Module):
    """It asks its last layer something, and its body is an RNN."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.body(x.unflatten(-1, (3, 2)))[0][:, -1].reshape(-1, self.last.in_features))


class TwoHeads(nn.Module):
    """Its last layer is called on two sets of features."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.left(x))) - self.last(torch.sin(self.right(x)))


def hooked():
    model = network()
    model[2].register_forward_hook(lambda module, args, output: 2 * output)
    return model


MODELS = {
    "plain": (network, "2"),
    "no bias": (lambda: network(bias=False), "2"),
    "log_softmax": (Softened, "last"),
    "head first": (Backwards, "last"),
    "GRU": (Asked, "last"),
    "two calls": (TwoHeads, "last"),
    "hook": (hooked, "2"),
    "wide": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 300)), "2"),
    "activation at the end": (lambda: nn.Sequential(*network(), nn.Softplus()), "2"),
}


def centred(net, x, y):
    outputs = net(x)
    return (outputs - outputs.mean(0)).square().mean() + outputs[y == 0].exp().mean()


def halves(net, x, y):
    return (F.cross_entropy(net(x[:4]), y[:4]) + F.cross_entropy(net(x[4:]), y[4:])) / 2


def contrastive(net, x, y):
    return F.cross_entropy(net(x) @ net(x + 0.1).T, torch.arange(len(x)))


def written_over(net, x, y):
    outputs = net(x) * 1.0
    outputs *= 3.0
    return F.cross_entropy(outputs, y)


LOSSES = {f.__name__: f for f in (cross_entropy, centred, halves, contrastive, written_over)}


class Oracle:
    """
    An episode of gradient descent with plain autograd. In the graph the last layer's features are those of the first
    step, each of whose values is replaced by the present step's; body weights move with where they began.
    """

    def __init__(self, model, layer):
        self.model, self.layer = model, layer

    def last(self, name):
        return name.rpartition(".")[0] == self.layer

    def network(self, weights, first=None, seen=None):
        """The model as a function of its inputs; features are noted in `seen`, or tied to those in `first`."""
        number = iter(range(1000))

        def tie(module, args):
            if seen is not None:
                seen.append(args[0])
            if first is None:
                return None
            start = first[next(number)]
            return (args[0].detach() + start - start.detach(),)

        def call(x):
            handle = self.model.get_submodule(self.layer).register_forward_pre_hook(tie)
            try:
                return functional_call(self.model, weights, (x,))
            finally:
                handle.remove()

        call.parameters = weights.values
        return call

    def gradients(self, data, loss, steps=STEPS):
        x, y, x_query, y_query = data
        m0 = dict(self.model.named_parameters())
        theta, first = dict(m0), []
        loss(self.network(theta, seen=first), x, y)
        for _ in range(steps):
            leaves = {name: t.detach().requires_grad_() for name, t in theta.items()}
            constants = torch.autograd.grad(loss(self.network(leaves), x, y), list(leaves.values()))
            step = dict(zip(leaves, constants))
            head = {name: t for name, t in theta.items() if self.last(name)}
            tied = loss(self.network({**{k: t.detach() for k, t in theta.items()}, **head}, first), x, y)
            step.update(zip(head, torch.autograd.grad(tied, list(head.values()), create_graph=True)))
            theta = {name: t - LR * step[name] for name, t in theta.items()}
        return torch.autograd.grad(loss(self.network(theta), x_query, y_query), list(m0.values()))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_the_meta_gradient_is_that_of_the_steps_written_out(name, loss):
    make, layer = MODELS[name]
    model, data = make(), task()
    niw = wrapper(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(niw, data, loss)[: len(list(model.parameters()))]
    assert niw.diagnostics()["second_order"] == f"last_layer: {layer}"
    assert_close(found, Oracle(model, layer).gradients(data, loss))
    none = run(wrapper(model, second_order="none"), data, loss)[: len(found)]
    assert distance(found, none) > 1e-5


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_so_it_is_after_any_number_of_steps(steps):
    model, data = network(), task()
    assert_close(run(wrapper(model), data, steps=steps)[:4], Oracle(model, "2").gradients(data, cross_entropy, steps))


@pytest.mark.parametrize("bias", [True, False])
def test_of_a_linear_model_the_gradient_is_maml_s(bias):
    model, data = nn.Linear(6, 3, bias=bias), task()
    expected = run(l2l.algorithms.MAML(copy.deepcopy(model), LR), data)
    assert_close(run(wrapper(model), data)[: 1 + bias], expected)
    ggn = wrapper(model, temperature=1e-18, curvature="ggn", prior_precision=1e-6, kl_weight=0.0)
    assert_close(run(ggn, data)[: 1 + bias], expected, 1e-8)


@pytest.mark.parametrize("bias", [True, False])
def test_where_the_body_stays_the_gradient_is_anil_s(bias):
    model, (x, y, x_query, y_query) = network(bias), task()
    niw = wrapper(model, learn_step_sizes=True)
    with torch.no_grad():
        for v in list(niw.hyper.log_variance)[:2]:
            v.sub_(60.0)
    found = run(niw, (x, y, x_query, y_query))[: 3 + bias]
    body, head = copy.deepcopy(model[:2]), copy.deepcopy(model[2])
    learner = l2l.algorithms.MAML(head, LR).clone()
    features = body(x)
    for _ in range(STEPS):
        learner.adapt(F.cross_entropy(learner(features), y))
    F.cross_entropy(learner(body(x_query)), y_query).backward()
    assert_close(found, [p.grad for p in (*body.parameters(), *head.parameters())])


def test_it_is_nearer_to_maml_s_gradient_than_a_first_order_one():
    near, far = [], []
    for seed in range(5):
        torch.manual_seed(seed)
        model, data = network(), task()
        exact = torch.cat([g.flatten() for g in run(l2l.algorithms.MAML(copy.deepcopy(model), LR), data)])
        for angles, first_order in ((near, False), (far, True)):
            own = torch.cat([g.flatten() for g in run(wrapper(model, first_order=first_order), data)[:4]])
            angles.append(F.cosine_similarity(own, exact, 0))
    assert all(a > b for a, b in zip(near, far))
    assert min(near) > 0.9


def with_penalty(net, x, y):
    """The body's weights reach the loss past the features."""
    weights = net.module.parameters() if hasattr(net, "module") else net.parameters()
    return F.cross_entropy(net(x), y) + 0.05 * sum(p.square().sum() for p in weights)


class Skip(nn.Module):
    """Its body reaches the outputs past the features."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(hidden))) * hidden + hidden.square()


class Reused(nn.Module):
    """The features themselves are used once more behind the last layer."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        return self.last(features) * features + features.square()


class Tied(nn.Module):
    """Its last layer's weight is the first one's too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Bypassed(Oracle):
    """Of the last layer's steps the whole graph is kept, to the body's weights too, which are not a step's but move."""

    def gradients(self, data, loss, steps=STEPS):
        x, y, x_query, y_query = data
        m0 = {name: p for name, p in self.model.named_parameters()}
        kept = {id(p) for p in self.model.get_submodule(self.layer).parameters()}
        theta = dict(m0)
        for _ in range(steps):
            value = loss(Weighted(self.model, theta), x, y)
            step = dict(zip(theta, torch.autograd.grad(value, list(theta.values()), create_graph=True)))
            theta = {k: t - LR * (step[k] if id(m0[k]) in kept else step[k].detach()) for k, t in theta.items()}
        return torch.autograd.grad(loss(Weighted(self.model, theta), x_query, y_query), list(m0.values()))


class Weighted:
    """A model with other weights, as losses see it."""

    def __init__(self, model, weights):
        self.model, self.weights = model, weights

    def __call__(self, x):
        return functional_call(self.model, self.weights, (x,))

    def parameters(self):
        return self.weights.values()


@pytest.mark.parametrize(
    ("make", "layer", "loss"),
    [
        pytest.param(Skip, "last", cross_entropy, id="skip connection"),
        pytest.param(Reused, "last", cross_entropy, id="features used once more"),
        pytest.param(Tied, "last", cross_entropy, id="tied weight"),
    ],
)
def test_where_the_body_reaches_the_loss_past_the_features_no_graph_is_cut(make, layer, loss):
    model, data = make(), task()
    niw = wrapper(model)
    with pytest.warns(UserWarning, match="keeps its whole graph") as caught:
        found = run(niw, data, loss)[: len(list(model.parameters()))]
    assert [w.filename for w in caught] == [__file__]
    assert_close(found, Bypassed(model, layer).gradients(data, loss))
    assert niw.diagnostics()["second_order"] == f"last_layer: {layer}, with whole graphs"


def test_a_penalty_on_all_weights_keeps_the_last_layer_s_graph_small():
    """Its gradient in the body's weights is a constant as theirs are, and the last layer's own has no body in it."""
    model, data = network(), task()
    niw = wrapper(model)
    found = run(niw, data, with_penalty)[:4]
    assert_close(found, Oracle(model, "2").gradients(data, with_penalty))
    assert niw.diagnostics()["second_order"] == "last_layer: 2"


def test_steps_of_both_kinds_can_follow_each_other():
    model, data = network(), task()

    def mixed(learner, x, y, i):
        learner.adapt((with_penalty if i % 2 else cross_entropy)(learner, x, y))

    found = run(wrapper(model), data, adapt=mixed)
    first = run(wrapper(model, second_order="none"), data, adapt=mixed)
    assert all(g.isfinite().all() for g in found)
    assert distance(found, first) > 1e-4


def test_steps_on_other_inputs_say_that_they_stop_at_their_features():
    """Their oracle: features of inputs that the first step had not seen are constants."""
    model, (x, y, x_query, y_query) = network(), task()

    def adapt(learner, x, y, i):
        learner.adapt(F.cross_entropy(learner(x + i), y))

    with pytest.warns(UserWarning, match="other inputs than the first one's") as caught:
        found = run(wrapper(model), (x, y, x_query, y_query), adapt=adapt)[:4]
    assert len(caught) == 1
    m0 = list(model.parameters())
    theta = m0
    for i in range(STEPS):
        leaves = [t.detach().requires_grad_() for t in theta]
        features = torch.tanh(F.linear(x + i, *leaves[:2]))
        step = list(torch.autograd.grad(F.cross_entropy(F.linear(features, *leaves[2:]), y), leaves))
        features = torch.tanh(F.linear(x, *m0[:2])) if i == 0 else features.detach()
        step[2:] = torch.autograd.grad(F.cross_entropy(F.linear(features, *theta[2:]), y), theta[2:], create_graph=True)
        theta = [t - LR * g for t, g in zip(theta, step)]
    query = F.linear(torch.tanh(F.linear(x_query, *theta[:2])), *theta[2:])
    assert_close(found, torch.autograd.grad(F.cross_entropy(query, y_query), m0))


@pytest.mark.parametrize("asked", ["wrapper", "clone", "adapt"])
def test_first_order_leaves_it_out(asked):
    model, data = network(), task()

    def adapt(learner, x, y, i):
        learner.adapt(F.cross_entropy(learner(x), y), first_order=True)

    none = run(wrapper(model, second_order="none"), data)
    if asked == "wrapper":
        found = run(wrapper(model, first_order=True), data)
    elif asked == "clone":
        found = run(wrapper(model), data, first_order=True)
    else:
        found = run(wrapper(model), data, adapt=adapt)
    assert_close(found, none)
    assert distance(found, run(wrapper(model), data)) > 1e-4


NO_LAST_LAYER = {
    "BatchNorm": (lambda: nn.Sequential(network(), nn.BatchNorm1d(3)), "BatchNorm1d '1'"),
    "LayerNorm": (lambda: nn.Sequential(network(), nn.LayerNorm(3)), "LayerNorm '1'"),
    "Bilinear": (lambda: Own(), "Own ''"),
    "frozen": (lambda: frozen_head(), "Linear '2'"),
}


class Own(nn.Module):
    """Its last weights are its own, in no module."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3))

    def forward(self, x):
        return x @ self.table


def frozen_head():
    model = network()
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize("name", NO_LAST_LAYER)
def test_a_model_that_ends_in_no_linear_layer_warns_once_and_has_first_order_steps(name):
    make, kind = NO_LAST_LAYER[name]
    model, data = make(), task()
    niw, none = (wrapper(model, allow_nograd=True, second_order=order) for order in ("last_layer", "none"))
    with pytest.warns(UserWarning, match=f"second_order='last_layer' needs.*{kind}") as caught:
        found = run(niw, data)
    assert_close(run(niw, data), found, 1e-12)
    assert len(caught) == 1
    assert_close(found, run(none, data), 1e-12)
    assert niw.diagnostics()["second_order"] == none.diagnostics()["second_order"] == "none"


def pruned(bare):
    torch.manual_seed(1)
    model = nn.Linear(6, 3) if bare else network()
    torch.nn.utils.prune.l1_unstructured(model if bare else model[2], "weight", 0.3)
    return model


def test_a_pruned_layer_keeps_its_graph():
    """It stays an nn.Linear, with another parameter than its weight."""
    data = task()
    expected = run(l2l.algorithms.MAML(pruned(bare=True), LR), data)
    assert_close(run(wrapper(pruned(bare=True)), data)[:2], expected)
    found = run(wrapper(pruned(bare=False)), data)[:4]
    assert_close(found, Oracle(pruned(bare=False), "2").gradients(data, cross_entropy))


class Live(TorchDispatchMode):
    """Every tensor that an operation makes, as long as it lives."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                self.storages[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        return made

    def megabytes(self):
        return sum(size for storage, size in self.storages.values() if not storage.expired()) / 1e6


def live_bytes(second_order, steps, width=400):
    """What an episode holds, in megabytes of features and weights, after its steps."""
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    x, y, _, _ = task()
    with Live() as live:
        learner = wrapper(model, second_order=second_order).clone()
        for _ in range(steps):
            learner.adapt(F.cross_entropy(learner(x), y))
        return live.megabytes()


def test_memory_is_flat_in_the_number_of_steps():
    few, many = live_bytes("last_layer", 2), live_bytes("last_layer", 12)
    body = 400 * 400 * 8 / 1e6
    assert many - few < 0.4 * body  # ten steps' gradients of the last layer, a hundredth of the body's each
    assert live_bytes("all", 12) - live_bytes("all", 2) > 10 * body


def test_features_of_later_steps_are_freed():
    model, (x, y, _, _) = network(), task()
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(StorageWeakRef(args[0].untyped_storage())))
    learner = wrapper(model).clone()
    for _ in range(6):
        learner.adapt(F.cross_entropy(learner(x), y))
    # the body's inner activations, but for the forward that shows the last layer and for the first step
    assert [ref.expired() for ref in seen[2:]] == [True] * 5


def test_predictions_on_the_way_change_nothing():
    model, data = network(), task()

    def adapt(learner, x, y, i):
        learner.adapt(F.cross_entropy(learner(x), y))
        with torch.random.fork_rng():
            learner.posterior().predict(x, samples=2, vectorize=False)
            learner.posterior(lambda net: F.cross_entropy(net(x), y), steps=2)
            learner.module(x)

    found = []
    for steps in (adapt, None):
        torch.manual_seed(3)
        found.append(run(NIW(model, LR), data, adapt=steps))
    assert_close(*found)


class Checkpointed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers[2](torch.utils.checkpoint.checkpoint(self.layers[:2], x, use_reentrant=False))


@pytest.mark.parametrize("second_order", ["none", "last_layer"])  # "all" is as wrong as MAML
def test_a_body_that_is_computed_anew_has_its_own_weights(second_order):
    model, data = network(), task()
    found = [run(wrapper(m, second_order=second_order), data) for m in (Checkpointed(model), model)]
    assert_close(*found)


def test_a_query_after_every_step_has_its_own_gradient():
    """MAML++'s multi-step loss."""
    model, data = network(), task()
    x, y, x_query, y_query = data
    niw = wrapper(model, learn_step_sizes=True)
    learner, losses = niw.clone(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other inputs than the first step's
        for _ in range(3):
            learner.adapt(F.cross_entropy(learner(x), y))
            losses.append(F.cross_entropy(learner(x_query), y_query))
    sum(losses).backward()
    found = [p.grad.clone() for p in niw.parameters()]
    each = [run(niw, data, steps=steps) for steps in (1, 2, 3)]
    assert_close(found, [sum(parts) for parts in zip(*each)])


def test_a_cloned_learner_goes_on_with_the_last_layer_s_steps():
    model, data = network(), task()
    x, y, x_query, y_query = data
    niw = wrapper(model)
    learner = niw.clone()
    for _ in range(2):
        learner.adapt(F.cross_entropy(learner(x), y))
    twin = learner.clone()
    for _ in range(STEPS - 2):
        twin.adapt(F.cross_entropy(twin(x), y))
    F.cross_entropy(twin(x_query), y_query).backward()
    assert_close([p.grad for p in niw.parameters()], run(wrapper(model), data))


def test_outputs_of_more_dimensions():
    model = network()
    data = torch.randn(3, 3, 6), torch.randn(3, 3, 3), torch.randn(5, 6), torch.randn(5, 3)
    found = []
    for reshape in (False, True):
        x, y = (t.reshape(9, -1) if reshape else t for t in data[:2])
        found.append(run(wrapper(copy.deepcopy(model)), (x, y, *data[2:]), lambda net, x, y: F.mse_loss(net(x), y)))
    assert_close(*found)


def test_one_example_by_itself():
    model, (x, y, x_query, y_query) = nn.Linear(6, 3), task()
    expected = run(l2l.algorithms.MAML(copy.deepcopy(model), LR), (x[0], y[0], x_query, y_query))
    assert_close(run(wrapper(model), (x[0], y[0], x_query, y_query))[:2], expected)


def test_steps_on_other_numbers_of_examples():
    def adapt(learner, x, y, i):
        n = 9 if i < 2 else 6
        learner.adapt(F.cross_entropy(learner(x[:n]), y[:n]))

    with pytest.warns(UserWarning, match="other inputs"):
        found = run(NIW(network(), LR), task(), adapt=adapt)
    assert all(g.isfinite().all() for g in found)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * g


def test_a_loss_without_second_derivatives_goes_by_first_order():
    niw, (x, y, *_) = wrapper(network()), task()
    learner = niw.clone(first_order=True)
    learner.adapt(F.cross_entropy(Once.apply(learner(x)).square(), y))
    F.cross_entropy(learner(x), y).backward()
    assert all(p.grad.abs().max() > 0 for p in niw.module.parameters())


def test_a_loss_whose_graph_was_freed_is_told():
    learner, (x, y, *_) = wrapper(network()).clone(), task()
    value = F.cross_entropy(learner(x), y)
    value.backward()
    with pytest.raises(LossError, match="freed"):
        learner.adapt(value)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, z):
        return self.last(torch.tanh(self.body(x) * z.mean()))


@pytest.mark.parametrize("other", [lambda q: q, lambda q: 2 * q, lambda q: q.clone()], ids=["same", "twice", "copy"])
def test_inputs_that_depend_on_each_other_get_their_gradient_once(other):
    model, (x, y, x_query, y_query), found = TwoInputs(), task(), []
    for second_order in ("last_layer", "none"):
        learner = wrapper(model, second_order=second_order, lr=1e-9).clone()
        for _ in range(2):
            learner.adapt(F.cross_entropy(learner(x, x), y))
        q = x_query.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the whole graph that is kept
            F.cross_entropy(learner(q, other(q)), y_query).backward()
        found.append(q.grad)
    assert torch.allclose(*found, atol=1e-7)


def test_a_later_support_loss_that_joins_the_outer_loss_goes_by_the_first_step_s_features():
    model, (x, y, _, _) = network(), task()
    niw = wrapper(model)
    learner = niw.clone()
    learner.adapt(F.cross_entropy(learner(x), y))
    loss = F.cross_entropy(learner(x), y)
    weights = [p.detach().clone() for p in learner.parameters()]
    learner.adapt(loss)
    loss.backward()
    m0 = list(model.parameters())
    first = torch.tanh(F.linear(x, *m0[:2]))
    step = torch.autograd.grad(F.cross_entropy(F.linear(first, *m0[2:]), y), m0[2:], create_graph=True)
    head = [m - LR * g for m, g in zip(m0[2:], step)]
    features = torch.tanh(F.linear(x, *weights[:2])) + first - first.detach()
    expected = torch.autograd.grad(F.cross_entropy(F.linear(features, *head), y), m0)
    assert_close([p.grad for p in m0], expected)


class Prompted(nn.Module):
    """Its features depend on a tensor that it was not called with, and that is no parameter."""

    def __init__(self):
        super().__init__()
        self.body, self.last, self.prompt = nn.Linear(6, 8), nn.Linear(8, 3), None

    def forward(self, x):
        return self.last(torch.tanh(self.body(x) + self.prompt))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_tensors_that_the_features_depend_on_get_their_gradient(steps):
    model, data, found = Prompted(), task(), []
    model.prompt = torch.randn(8, requires_grad=True)
    for second_order in ("last_layer", "none"):
        model.prompt.grad = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(wrapper(model, second_order=second_order, lr=1e-9), data, steps=steps)
        found.append(model.prompt.grad)
    assert found[0].abs().max() > 1e-3
    assert torch.allclose(*found, atol=1e-7)


def test_it_is_said_that_whole_graphs_are_kept_then():
    model = Prompted()
    model.prompt = torch.randn(8, requires_grad=True)
    with pytest.warns(UserWarning, match="keeps its whole graph"):
        run(wrapper(model), task())


class Views(nn.Module):
    """One last layer, on two bodies."""

    def __init__(self):
        super().__init__()
        self.f, self.g, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.f(x)))

    def other(self, x):
        return self.last(torch.sin(self.g(x)))


def test_forwards_on_the_same_inputs_by_other_methods_have_features_of_their_own():
    model, (x, y, x_query, y_query) = Views(), task()

    def loss(learner, x, y):
        return F.cross_entropy(learner(x), y) + F.cross_entropy(learner.other(x), y)

    found = run(wrapper(model), (x, y, x_query, y_query), loss)[:6]
    m0 = list(model.parameters())

    def features(weights, x):
        return torch.tanh(F.linear(x, *weights[:2])), torch.sin(F.linear(x, *weights[2:4]))

    def losses(both, last, y):
        return sum(F.cross_entropy(F.linear(f, *last), y) for f in both)

    first, theta = features(m0, x), m0
    for _ in range(STEPS):
        leaves = [t.detach().requires_grad_() for t in theta]
        step = list(torch.autograd.grad(losses(features(leaves, x), leaves[4:], y), leaves))
        tied = [f.detach() + one - one.detach() for f, one in zip(features(leaves, x), first)]
        step[4:] = torch.autograd.grad(losses(tied, theta[4:], y), theta[4:], create_graph=True)
        theta = [t - LR * g for t, g in zip(theta, step)]
    outer = losses(features(theta, x_query), theta[4:], y_query)
    assert_close(found, torch.autograd.grad(outer, m0))


def test_the_last_layer_of_forward_is_found_though_another_method_came_first():
    class Encoding(Views):
        def encode(self, x):
            return torch.tanh(self.f(x))

    niw = wrapper(Encoding())
    learner, (x, y, *_) = niw.clone(allow_unused=True), task()
    learner.encode(x)
    learner.adapt(F.cross_entropy(learner(x), y))
    assert niw.diagnostics()["second_order"] == "last_layer: last"


def test_a_forward_that_does_not_call_the_last_layer_is_told():
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

        def forward(self, x, k):
            return self.heads[k](torch.tanh(self.body(x)))

    learner, (x, y, *_) = wrapper(Choice()).clone(allow_unused=True), task()
    learner.adapt(F.cross_entropy(learner(x, 0), y))
    with pytest.warns(UserWarning, match=r"did not call 'heads\.0'.*first order"):
        learner(x, 1)


class Memoised(nn.Module):
    """It keeps a tensor for later calls, counts them, and differentiates inside."""

    def __init__(self):
        super().__init__()
        self.body, self.last, self.scale = nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(8))
        self.kept = None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        x = x.detach().requires_grad_()
        hidden = torch.tanh(self.body(x))
        (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        if self.kept is None:
            self.kept = torch.tanh(self.scale)
        return self.last(hidden * self.kept + slope.mean())


def test_looking_for_the_last_layer_leaves_no_trace():
    found = []
    for second_order in ("last_layer", "none"):
        torch.manual_seed(0)
        model = Memoised()
        data = task()
        niw = wrapper(model, second_order=second_order, lr=1e-9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(run(niw, data, steps=0)[:5])
        assert model.calls == 0
        assert model.kept is None
    assert_close(*found)


def test_learners_run_under_transforms_of_torch_func():
    learner, (x, y, *_) = wrapper(network()).clone(), task()
    learner.adapt(F.cross_entropy(learner(x), y))
    assert torch.allclose(torch.func.vmap(learner)(x), learner(x))
    assert torch.func.jacrev(learner)(x[0]).shape == (3, 6)
