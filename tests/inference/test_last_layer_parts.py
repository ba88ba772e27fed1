"""The parts of second_order='last_layer': what is behind the features, the node that stands for it, where to cut."""

import gc
import weakref

import pytest
import torch
from torch import nn

from l2l_niw.inference.last_layer import Behind, cuts_behind, cut, differentiate, last_called

BODY, LAST = (0, 1), (2, 3)


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

    def cut(self, x, first=None, number=0):
        return cut(self.features(x), [*self.weights[:2], x], first or [], list(range(number)))


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
    found = Behind(features, net.weights[:2]).nodes()
    assert {features.grad_fn, product.grad_fn} <= found
    assert not {w.grad_fn for w in net.weights} & found
    assert not {w.grad_fn.next_functions[0][0] for w in net.weights} & found, "what is behind the inputs is not"


@pytest.mark.parametrize("own", ["weights", "leaves"])
def test_features_of_the_inputs_alone_have_nodes(own):
    net = Net()
    first, second = getattr(net, own)[:2]
    x = torch.randn(5, 3)
    assert Behind(torch.tanh(x @ first.T + second), [first, second]).nodes()
    data = x.requires_grad_()
    assert Behind(torch.tanh(data @ first.T + second), [first, second, data]).nodes()
    assert Behind(torch.tanh(data @ first.T), [first, second, data]).nodes(), "not every input needs to be used"


@pytest.mark.parametrize("derived", [False, True])
def test_features_of_other_tensors_with_a_gradient_have_none(derived):
    net, x, other = Net(), torch.randn(5, 3), torch.randn(4, requires_grad=True)
    features = net.features(x) + (other.exp() if derived else other)
    assert Behind(features, net.weights[:2]).nodes() is None
    assert Behind(net.features(x), net.weights[:1]).nodes() is None
    assert Behind(features, [*net.weights[:2], other]).nodes()


def test_features_that_are_such_a_tensor_have_none():
    net, other = Net(), torch.randn(5, 4, requires_grad=True)
    assert Behind(other, net.weights[:2]).nodes() is None
    assert Behind(other, [*net.weights[:2], other]).nodes() is not None


# the node that stands for it


@pytest.mark.parametrize("data", [False, True])
def test_a_bodys_gradient_is_that_of_what_it_stands_for(data):
    net, x = Net(), torch.randn(5, 3, requires_grad=data)
    whole = net.features(x)
    inside = net.cut(x, first=[]).inside
    assert torch.equal(inside, whole)
    assert inside.grad_fn is not whole.grad_fn
    leaves = [*net.leaves, *([x] if data else [])]
    found, expected = (gradients(net.last(f).sum(), leaves, retain_graph=True) for f in (inside, whole))
    assert_close(found, expected)


def test_a_body_can_be_differentiated_again():
    net, x, products = Net(), torch.randn(5, 3, requires_grad=True), []
    inputs = [*net.leaves, x]
    for inside in (net.cut(x, first=[]).inside, net.features(x)):
        once = gradients(net.last(inside).square().sum(), inputs, create_graph=True)
        products.append(gradients(sum(g.sin().sum() for g in once), inputs, retain_graph=True))
    assert_close(*products)


def test_after_a_step_a_bodys_gradient_goes_to_the_first_steps_features():
    net, x = Net(), torch.randn(5, 3)
    first = torch.randn(5, 4, requires_grad=True)
    c = net.cut(x, first=[first])
    assert c.first is first
    loss = net.last(c.inside).square().sum()
    alone = c.inside.detach().requires_grad_()
    (expected,) = gradients(net.last(alone).square().sum(), [alone], retain_graph=True)
    before = gradients(loss, [*net.leaves[:2], first], retain_graph=True)
    assert all(g.any() for g in before[:2])
    assert not before[2].any()
    c.behind.release()
    *body, of_first = gradients(loss, [*net.leaves[:2], first], retain_graph=True)
    assert not any(g.any() for g in body)
    assert_close([of_first], [expected])
    assert gradients(loss, net.leaves[2:])[0].any(), "the last layer's own are as before"


def test_after_a_step_on_other_inputs_a_bodys_gradient_goes_nowhere():
    net, x = Net(), torch.randn(5, 3)
    c = net.cut(x, first=[])
    loss = net.last(c.inside).sum()
    c.behind.release()
    assert torch.autograd.grad(loss, net.leaves[:2], allow_unused=True) == (None, None)


def test_a_released_body_holds_nothing_of_its_graph():
    net, x = Net(), torch.randn(5, 3)
    c = net.cut(x, first=[])
    loss, features = net.last(c.inside).sum(), weakref.ref(c.behind.features)
    c.behind.release()
    gc.collect()
    assert features() is None
    loss.backward()


def test_a_graph_that_is_retained_serves_twice_and_one_that_is_not_once():
    net, x = Net(), torch.randn(5, 3)
    loss = net.last(net.cut(x, first=[]).inside).sum()
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
        inside = cut(features, net.weights[:2], [], []).inside if cuts else features
        loss = net.last(inside).sum() + features.square().sum() + hidden.exp().sum()
        found.append(gradients(loss, net.leaves, retain_graph=not cuts))
    assert_close(*found)


def test_two_bodies_can_share_what_is_behind_them():
    net, x, found = Net(), torch.randn(5, 3), []
    for cuts in (False, True):
        hidden = x @ net.weights[0].T + net.weights[1]
        features = [hidden.tanh(), hidden.sin()]
        calls = []
        inside = [cut(f, net.weights[:2], [], calls).inside if cuts else f for f in features]
        found.append(gradients((net.last(inside[0]) * net.last(inside[1])).sum(), net.leaves, retain_graph=not cuts))
    assert_close(*found)


def test_a_leaf_among_the_inputs_may_be_all_that_is_asked_for():
    net, x = Net(), torch.randn(5, 3, requires_grad=True)
    expected = gradients(net.last(net.features(x)).sum(), [x], retain_graph=True)
    assert_close(gradients(net.last(net.cut(x, first=[]).inside).sum(), [x]), expected)


# where to cut


def test_features_stand_for_those_of_the_same_call_and_shape():
    net, x = Net(), torch.randn(5, 3)
    first = [torch.randn(5, 4), torch.randn(5, 4), torch.randn(6, 4)]
    assert [net.cut(x, first, number).first for number in range(4)] == [first[0], first[1], None, None]


def test_the_cuts_behind_a_loss_are_those_that_it_comes_to():
    net, x = Net(), torch.randn(5, 3)
    cuts = [net.cut(x + i, first=[]) for i in range(3)]
    loss = net.last(cuts[0].inside).sum() + net.last(cuts[2].inside).square().sum()
    found = cuts_behind(loss, cuts, [net.weights], BODY)
    assert sorted(cuts.index(c) for c in found) == [0, 2]
    penalised = loss + net.weights[2].norm() + net.weights[3].sum()
    assert len(cuts_behind(penalised, cuts, [net.weights], BODY)) == 2, "the last layer's weights may be there too"


@pytest.mark.parametrize("other", ["a penalty", "a skip connection", "its own features", "a later use"])
def test_a_loss_that_comes_to_the_body_in_another_way_has_no_cuts(other):
    net, x = Net(), torch.randn(5, 3)
    c = net.cut(x, first=[])
    outputs = net.last(c.inside)
    loss = {
        "a penalty": lambda: outputs.sum() + net.weights[1].norm(),
        "a skip connection": lambda: (outputs + net.features(x)[:, :2]).sum(),
        "its own features": lambda: outputs.sum() + c.behind.features.square().sum(),
        "a later use": lambda: (outputs @ net.weights[0][:2]).sum(),
    }[other]()
    assert cuts_behind(loss, [c], [net.weights], BODY) is None


def test_weights_count_as_they_are_and_as_forwards_ran_with_them():
    net, x = Net(), torch.randn(5, 3)
    own = net.weights
    net.weights = [w.view_as(w) for w in own]
    c = net.cut(x, first=[])
    loss = net.last(c.inside).sum()
    assert cuts_behind(loss, [c], [own, net.weights], BODY) == [c]
    assert cuts_behind(loss + own[0].sum(), [c], [own, net.weights], BODY) is None
    assert cuts_behind(loss + net.weights[0].sum(), [c], [own, net.weights], BODY) is None


def test_what_is_beyond_the_weights_is_an_earlier_step():
    """The last layer's weights depend on the body's first ones, by the first step."""
    net, x = Net(), torch.randn(5, 3)
    first, start = net.features(x), net.weights
    net.weights = [start[0] - 0.1, start[1] - 0.1, start[2] - 0.1 * first.mean(), start[3] - 0.1 * start[1].sum()]
    c = net.cut(x, first=[first])
    assert cuts_behind(net.last(c.inside).sum(), [c], [net.weights], BODY) == [c]


@pytest.mark.parametrize("kept", [LAST, ()])
@pytest.mark.parametrize("retain", [False, True])
def test_gradients_of_a_loss_that_is_cut_are_those_of_the_whole(kept, retain):
    net, x = Net(), torch.randn(5, 3)
    expected = torch.autograd.grad(net.last(net.features(x)).square().sum(), net.weights)
    c = net.cut(x, first=[])
    loss = net.last(c.inside).square().sum()
    if kept:
        found = differentiate(loss, net.weights, kept, [c], retain=retain)
        again = torch.autograd.grad(c.behind.features.sum(), net.weights[0]) if retain else None
        assert (again is not None) == retain
    else:
        found = differentiate(loss, net.weights, kept)
    assert_close(found, expected)
    assert [g.requires_grad for g in found] == [i in kept for i in range(4)]


def test_the_kept_gradients_have_the_graph_of_the_first_steps_features():
    """d(gradient) / d(weights and first features), where the second step's features stand for the first's."""
    net, x = Net(), torch.randn(5, 3)
    first = net.features(x).detach().requires_grad_()
    c = net.cut(x, first=[first])
    found = differentiate(net.last(c.inside).square().sum(), net.weights, LAST, [c])[2:]
    c.behind.release()
    expected = torch.autograd.grad(net.last(first).square().sum(), net.weights[2:], create_graph=True)
    inputs = [first, *net.leaves[2:]]
    assert_close(*(gradients(sum(g.sin().sum() for g in own), inputs, retain_graph=True) for own in (found, expected)))


def test_without_a_graph_no_gradient_has_one():
    net, x = Net(), torch.randn(5, 3)
    c = net.cut(x, first=[])
    found = differentiate(net.last(c.inside).sum(), net.weights, LAST, [c], create_graph=False)
    assert not any(g.requires_grad for g in found)


def test_weights_that_a_loss_does_not_depend_on_have_no_gradient():
    net, x = Net(), torch.randn(5, 3)
    c = cut(torch.tanh(x @ net.weights[0].T), net.weights[:2], [], [])
    found = differentiate((c.inside @ net.weights[2].T).sum(), net.weights, LAST, [c])
    assert [g is None for g in found] == [False, True, False, True]


def test_the_last_layer_is_the_module_with_parameters_that_is_called_last():
    head, body = nn.Linear(4, 2), nn.Linear(3, 4)
    model, stranger = nn.ModuleList([head, nn.Tanh(), body]), nn.Linear(2, 2)
    x = torch.randn(5, 3)
    assert last_called(model, lambda: stranger(model[1](head(body(x))))) is head
    assert last_called(model, lambda: body(x)) is body
    assert last_called(model, lambda: model[1](x)) is None
