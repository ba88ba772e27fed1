"""The parts of second_order='last_layer': what is behind the features, the node that stands for it, where to cut."""

import gc
import weakref

import pytest
import torch
from torch import nn

from l2l_niw.errors import LossError
from l2l_niw.inference.last_layer import Cut, Cuts, differentiate, last_called, reaches_past


@pytest.fixture(autouse=True)
def in_double(double):
    pass


class Net:
    """Two layers whose weights, as a learner's, have a graph to leaves; its features may be cut off."""

    def __init__(self):
        self.leaves = [torch.randn(s).requires_grad_() for s in ((4, 3), (4,), (2, 4), (2,))]
        self.weights = [t * 1.0 for t in self.leaves]

    def features(self, x):
        return torch.tanh(x @ self.weights[0].T + self.weights[1])

    def last(self, features):
        return (features @ self.weights[2].T + self.weights[3]).sin()

    def cut(self, x, first=(), number=0):
        return cut(self.features(x), [*self.weights[:2], x], first, number)


def cut(features, inputs, first=(), number=0):
    """Features cut off, in the last layer's call of this number: what it gets instead, and the cuts of its forward."""
    cuts = Cuts(inputs, first)
    for _ in range(number):
        cuts.cut(features.detach())
    return cuts.cut(features), cuts


def gradients(outputs, inputs, **options):
    options = {"allow_unused": True, "materialize_grads": True, **options}
    return torch.autograd.grad(outputs, inputs, **options)


def assert_close(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert torch.allclose(a, b, atol=1e-12)


# what is behind the features


def test_the_nodes_behind_features_are_those_up_to_the_inputs():
    net, x = Net(), torch.randn(5, 3)
    product = x @ net.weights[0].T
    features = torch.tanh(product + net.weights[1])
    found = Cut(features, net.weights[:2], []).nodes()
    assert {features.grad_fn, product.grad_fn} <= found
    assert not {w.grad_fn for w in net.weights} & found
    assert not {w.grad_fn.next_functions[0][0] for w in net.weights} & found, "what is behind the inputs is not"


@pytest.mark.parametrize("own", ["weights", "leaves"])
def test_features_of_the_inputs_alone_have_nodes(own):
    net = Net()
    first, second = getattr(net, own)[:2]
    x = torch.randn(5, 3)
    assert Cut(torch.tanh(x @ first.T + second), [first, second], []).nodes()
    data = x.requires_grad_()
    assert Cut(torch.tanh(data @ first.T + second), [first, second, data], []).nodes()
    assert Cut(torch.tanh(data @ first.T), [first, second, data], []).nodes(), "not every input needs to be used"


@pytest.mark.parametrize("derived", [False, True])
def test_features_of_other_tensors_with_a_gradient_have_none(derived):
    net, x, other = Net(), torch.randn(5, 3), torch.randn(4, requires_grad=True)
    features = net.features(x) + (other.exp() if derived else other)
    assert Cut(features, net.weights[:2], []).nodes() is None
    assert Cut(net.features(x), net.weights[:1], []).nodes() is None
    assert Cut(features, [*net.weights[:2], other], []).nodes()


def test_features_that_are_such_a_tensor_have_none():
    net, other = Net(), torch.randn(5, 4, requires_grad=True)
    assert Cut(other, net.weights[:2], []).nodes() is None
    assert Cut(other, [*net.weights[:2], other], []).nodes() is not None


# the node that stands for it


@pytest.mark.parametrize("data", [False, True])
def test_a_bodys_gradient_is_that_of_what_it_stands_for(data):
    net, x = Net(), torch.randn(5, 3, requires_grad=data)
    whole = net.features(x)
    inside, _ = net.cut(x)
    assert torch.equal(inside, whole)
    assert inside.grad_fn is not whole.grad_fn
    leaves = [*net.leaves, *([x] if data else [])]
    found, expected = (gradients(net.last(f).sum(), leaves, retain_graph=True) for f in (inside, whole))
    assert_close(found, expected)


def test_a_body_can_be_differentiated_again():
    net, x, products = Net(), torch.randn(5, 3, requires_grad=True), []
    inputs = [*net.leaves, x]
    for inside in (net.cut(x)[0], net.features(x)):
        once = gradients(net.last(inside).square().sum(), inputs, create_graph=True)
        products.append(gradients(sum(g.sin().sum() for g in once), inputs, retain_graph=True))
    assert_close(*products)


def test_after_a_step_a_bodys_gradient_goes_to_the_first_steps_features():
    net, x = Net(), torch.randn(5, 3)
    first = torch.randn(5, 4, requires_grad=True)
    inside, cuts = net.cut(x, first=[first])
    loss = net.last(inside).square().sum()
    alone = inside.detach().requires_grad_()
    (expected,) = gradients(net.last(alone).square().sum(), [alone], retain_graph=True)
    before = gradients(loss, [*net.leaves[:2], first], retain_graph=True)
    assert all(g.any() for g in before[:2])
    assert not before[2].any()
    cuts.cuts[0].release()
    *body, of_first = gradients(loss, [*net.leaves[:2], first], retain_graph=True)
    assert not any(g.any() for g in body)
    assert_close([of_first], [expected])
    assert gradients(loss, net.leaves[2:])[0].any(), "the last layer's own are as before"


def test_after_a_step_on_other_inputs_a_bodys_gradient_goes_nowhere():
    net, x = Net(), torch.randn(5, 3)
    inside, cuts = net.cut(x)
    loss = net.last(inside).sum()
    cuts.cuts[0].release()
    assert torch.autograd.grad(loss, net.leaves[:2], allow_unused=True) == (None, None)


def test_a_released_body_holds_nothing_of_its_graph():
    net, x = Net(), torch.randn(5, 3)
    inside, cuts = net.cut(x)
    loss, features = net.last(inside).sum(), weakref.ref(cuts.cuts[0].features)
    cuts.cuts[0].release()
    gc.collect()
    assert features() is None
    loss.backward()


def test_a_graph_that_is_retained_serves_twice_and_one_that_is_not_once():
    net, x = Net(), torch.randn(5, 3)
    loss = net.last(net.cut(x)[0]).sum()
    once = gradients(loss, net.leaves[:2], retain_graph=True)
    assert_close(gradients(loss, net.leaves[:2]), once)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(loss, net.leaves[:2])


def test_a_body_and_its_own_graph_can_be_behind_one_loss():
    """The last layer's features, and what they were made of, in one loss."""
    net, x, found = Net(), torch.randn(5, 3), []
    for cuts in (False, True):
        hidden = x @ net.weights[0].T + net.weights[1]
        features = torch.tanh(hidden)
        inside = cut(features, net.weights[:2])[0] if cuts else features
        loss = net.last(inside).sum() + features.square().sum() + hidden.exp().sum()
        found.append(gradients(loss, net.leaves, retain_graph=not cuts))
    assert_close(*found)


def test_two_bodies_can_share_what_is_behind_them():
    net, x, found = Net(), torch.randn(5, 3), []
    for cuts in (False, True):
        hidden = x @ net.weights[0].T + net.weights[1]
        features = [hidden.tanh(), hidden.sin()]
        cut_off = Cuts(net.weights[:2], []).cut
        inside = [cut_off(f) if cuts else f for f in features]
        found.append(gradients((net.last(inside[0]) * net.last(inside[1])).sum(), net.leaves, retain_graph=not cuts))
    assert_close(*found)


def test_a_leaf_among_the_inputs_may_be_all_that_is_asked_for():
    net, x = Net(), torch.randn(5, 3, requires_grad=True)
    expected = gradients(net.last(net.features(x)).sum(), [x], retain_graph=True)
    assert_close(gradients(net.last(net.cut(x)[0]).sum(), [x]), expected)


# where to cut


def test_features_stand_for_those_of_the_same_call_and_shape():
    net, x = Net(), torch.randn(5, 3)
    first = [torch.randn(shape, requires_grad=True) for shape in ((5, 4), (5, 4), (6, 4))]
    for number, expected in enumerate([first[0], first[1], None, None]):
        inside, cuts = net.cut(x, first, number)
        cuts.cuts[0].release()
        found = torch.autograd.grad(inside.sum(), first, allow_unused=True, retain_graph=True)
        assert [t is expected for t in first] == [g is not None for g in found[:3]]


def test_features_of_other_tensors_are_left_as_they_are():
    net, x, other = Net(), torch.randn(5, 3), torch.randn(4, requires_grad=True)
    features = net.features(x) + other
    found, cuts = cut(features, net.weights[:2])
    assert found is features
    assert cuts.failed
    assert cuts.cuts == []


@pytest.mark.parametrize("other", ["nothing", "a penalty", "a skip connection", "its own features", "a later use"])
def test_whether_the_last_layers_gradients_reach_the_body_past_its_features(other):
    net, x = Net(), torch.randn(5, 3)
    features = net.features(x)
    inside, cuts = cut(features, net.weights[:2])
    outputs = net.last(inside)
    loss = {
        "nothing": lambda: outputs.square().sum(),
        "a penalty": lambda: outputs.square().sum() + net.weights[1].norm(),
        "a skip connection": lambda: (outputs + net.features(x)[:, :2]).square().sum(),
        "its own features": lambda: outputs.sum() * features.square().sum(),
        "a later use": lambda: (outputs @ net.weights[0][:2]).square().sum(),
    }[other]()
    found = differentiate(loss, net.weights, [cuts], create_graph=True, retain_graph=True)
    assert reaches_past(found[2:], [cuts], net.weights[:2]) == (other not in ("nothing", "a penalty"))


def test_what_is_beyond_the_weights_is_an_earlier_step():
    """The last layer's weights depend on the body's first ones, by the first step."""
    net, x = Net(), torch.randn(5, 3)
    first, start = net.features(x), net.weights
    net.weights = [start[0] - 0.1, start[1] - 0.1, start[2] - 0.1 * first.mean(), start[3] - 0.1 * start[1].sum()]
    inside, cuts = net.cut(x, first=[first])
    found = differentiate(net.last(inside).square().sum(), net.weights, [cuts], True, True)
    assert not reaches_past(found[2:], [cuts], net.weights[:2])


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_a_loss_that_is_cut_are_those_of_the_whole(create_graph):
    net, x = Net(), torch.randn(5, 3)
    expected = torch.autograd.grad(net.last(net.features(x)).square().sum(), net.weights)
    inside, cuts = net.cut(x)
    found = differentiate(net.last(inside).square().sum(), net.weights, [cuts], create_graph, True)
    assert_close(found, expected)
    assert [g.requires_grad for g in found] == [False, False, create_graph, create_graph]
    assert not cuts.cuts[0].stepping
    assert torch.autograd.grad(cuts.cuts[0].features.sum(), net.weights[0]), "their graph is left"


def test_a_penalty_on_the_body_is_in_its_gradients():
    net, x = Net(), torch.randn(5, 3)

    def loss(features):
        return net.last(features).square().sum() + net.weights[0].pow(3).sum()

    expected = torch.autograd.grad(loss(net.features(x)), net.weights)
    inside, cuts = net.cut(x)
    assert_close(differentiate(loss(inside), net.weights, [cuts], True, True), expected)


def test_the_kept_gradients_have_the_graph_of_the_first_steps_features():
    """d(gradient) / d(weights and first features), where the second step's features stand for the first's."""
    net, x = Net(), torch.randn(5, 3)
    first = net.features(x).detach().requires_grad_()
    inside, cuts = net.cut(x, first=[first])
    found = differentiate(net.last(inside).square().sum(), net.weights, [cuts], True, True)[2:]
    cuts.cuts[0].release()
    expected = torch.autograd.grad(net.last(first).square().sum(), net.weights[2:], create_graph=True)
    inputs = [first, *net.leaves[2:]]
    assert_close(*(gradients(sum(g.sin().sum() for g in own), inputs, retain_graph=True) for own in (found, expected)))


def test_weights_that_a_loss_does_not_depend_on_have_no_gradient():
    net, x = Net(), torch.randn(5, 3)
    inside, cuts = cut(torch.tanh(x @ net.weights[0].T), net.weights[:2])
    found = differentiate((inside @ net.weights[2].T).sum(), net.weights, [cuts], True, True)
    assert [g is None for g in found] == [False, True, False, True]


def test_a_freed_graph_is_told():
    net, x = Net(), torch.randn(5, 3)
    inside, cuts = net.cut(x)
    loss = net.last(inside).sum()
    loss.backward()
    with pytest.raises(LossError, match="freed by an earlier backward"):
        differentiate(loss, net.weights, [cuts], True, True)
    assert not cuts.cuts[0].stepping


def test_the_last_layer_is_the_module_with_parameters_that_is_called_last():
    head, body = nn.Linear(4, 2), nn.Linear(3, 4)
    model, stranger = nn.ModuleList([head, nn.Tanh(), body]), nn.Linear(2, 2)
    x = torch.randn(5, 3)
    assert last_called(model, lambda: stranger(model[1](head(body(x))))) is head
    assert last_called(model, lambda: body(x)) is body
    assert last_called(model, lambda: model[1](x)) is None
