"""What learn2learn's MAML does for its users, and what they ran into: the same holds here."""

import contextlib
import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from l2l_niw import NIW
from l2l_niw.inference.curvature import GGN

every_order = pytest.mark.parametrize("second_order", ["none", "last_layer", "all"])
every_inference = pytest.mark.parametrize("inference", ["langevin", "closed_form"])


def small_model():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 20), nn.Sigmoid(), nn.Linear(20, 4))
    model.register_buffer("table", torch.zeros(1, 2, 3, 4))
    return model


def test_a_clone_computes_exactly_what_the_model_computes():
    niw, x = NIW(small_model(), lr=0.01), torch.randn(7, 10)
    for clone in (niw.clone(), niw.clone()):
        assert torch.equal(clone(x), niw.module(x))
    niw.clone()(x).norm().backward()
    for p in niw.module.parameters():
        assert p.grad.norm() > 0


def test_before_any_step_the_gradient_is_the_models_own():
    model, x = small_model(), torch.randn(7, 10)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    NIW(model, lr=0.01).clone()(x).square().sum().backward()
    for p, g in zip(model.parameters(), expected):
        assert torch.equal(p.grad, g)


def test_inner_steps_lower_the_inner_loss():
    niw, x, y = NIW(small_model(), lr=0.1), torch.randn(7, 10), torch.randint(4, (7,))
    learner = niw.clone()
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(learner(x), y)
        losses.append(loss.item())
        learner.adapt(loss)
    assert all(later < earlier for earlier, later in zip(losses, losses[1:]))


def test_the_model_is_never_written_to_by_an_episode():
    niw, x = NIW(small_model(), lr=0.05), torch.randn(7, 10)
    before = copy.deepcopy(niw.state_dict())
    learner = niw.clone()
    for _ in range(4):
        learner.adapt(learner(x).norm())
    learner(x).norm().backward()
    learner.posterior().predict(x)
    for key, value in niw.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_unused_parameters_stay_at_the_prior():
    niw = NIW(small_model(), lr=0.01, allow_unused=True, prior_precision=100.0)
    learner = niw.clone()
    used = {"0.weight", "2.weight", "4.weight"}
    for _ in range(4):
        learner.adapt(sum(p.norm() for name, p in learner.module.named_parameters() if name in used))
    learner(torch.randn(7, 10)).norm().backward()
    assert all(p.grad is not None for p in niw.parameters())
    post = learner.posterior()
    for name, p in niw.module.named_parameters():
        if name not in used:
            assert torch.equal(dict(learner.module.named_parameters())[name], p)
            assert torch.allclose(post.mean[name], p)
            assert torch.allclose(post.variance[name], torch.tensor(1 / 100.0))
        else:
            assert not torch.allclose(post.mean[name], p)


def test_frozen_parameters_stay_and_get_no_gradient():
    model = small_model()
    model[2].weight.requires_grad_(False)
    frozen = model[2].weight.clone()
    niw, x = NIW(model, lr=0.01, allow_nograd=True), torch.randn(7, 10)
    learner = niw.clone()
    for _ in range(3):
        learner.adapt(learner(x).norm())
    learner(x).norm().backward()
    assert torch.equal(model[2].weight, frozen)
    assert torch.equal(learner.module[2].weight, frozen)
    assert "2.weight" not in learner.posterior().mean
    for name, p in niw.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name


def test_frozen_parameters_need_allow_nograd_and_adapt_can_grant_it():
    model = small_model()
    model[2].weight.requires_grad_(False)
    learner, x = NIW(model, lr=0.01).clone(), torch.randn(7, 10)
    loss = learner(x).norm()
    with pytest.raises(ValueError, match="'2.weight'.*allow_nograd=True"):
        learner.adapt(loss)
    learner.adapt(loss, allow_nograd=True)
    learner = NIW(model, lr=0.01).clone(allow_nograd=True)
    learner.adapt(learner(x).norm())
    assert torch.equal(learner.module[2].weight, model[2].weight)


def test_layers_frozen_after_wrapping_are_left_alone():
    niw, x = NIW(small_model(), lr=0.01, allow_nograd=True), torch.randn(7, 10)
    niw.module[0].requires_grad_(False)
    learner = niw.clone()
    learner.adapt(learner(x).norm())
    assert torch.equal(learner.module[0].weight, niw.module[0].weight)
    assert not torch.equal(learner.module[2].weight, niw.module[2].weight)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_networks(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 5, batch_first=True)
            self.out = nn.Linear(5, 2)

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])

    niw, x, y = NIW(Net(), lr=0.5, temperature=1e-6), torch.randn(6, 4, 3), torch.randint(2, (6,))
    loss = nn.CrossEntropyLoss()
    learner = niw.clone()
    first = loss(learner(x), y)
    learner.adapt(first)
    for _ in range(4):
        learner.adapt(loss(learner(x), y))
    last = loss(learner(x), y)
    assert last < first
    last.backward()
    assert all(p.grad.abs().max() > 0 for p in niw.parameters())
    with pytest.warns(UserWarning, match="one after another.*vectorize=False"):  # vmap knows no recurrent layer
        outputs = learner.posterior().predict(x, samples=3)
    assert outputs.shape == (3, 6, 2)
    assert outputs.std(0).min() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.posterior().predict(x, samples=3, vectorize=False)
    assert not torch.equal(learner.module.rnn._flat_weights[0], niw.module.rnn._flat_weights[0])


def test_attributes_are_reached_through_wrapper_and_learner():
    class Net(nn.Linear):
        colour = "green"

        def twice(self, x):
            return 2 * self(x)

    niw, x = NIW(Net(3, 2), lr=0.1), torch.randn(4, 3)
    learner = niw.clone()
    assert niw.colour == learner.colour == "green"
    assert torch.equal(learner.twice(x), 2 * niw.module(x))
    learner.adapt(learner(x).norm())
    assert torch.equal(learner.weight, learner.module.weight)
    with pytest.raises(AttributeError, match="no_such_thing"):
        learner.no_such_thing  # noqa: B018


def test_deep_copies_are_independent():
    niw, x = NIW(small_model(), lr=0.1), torch.randn(7, 10)
    learner = niw.clone()
    learner.adapt(learner(x).norm())
    twin = copy.deepcopy(niw)
    with torch.no_grad():
        twin.module[0].weight.add_(1.0)
        twin.hyper.log_variance[0].add_(1.0)
    assert not torch.equal(twin.module[0].weight, niw.module[0].weight)
    assert not torch.equal(twin.hyper.log_variance[0], niw.hyper.log_variance[0])
    assert torch.equal(twin.clone()(x), twin.module(x))


def test_a_wrapper_s_adapt_takes_what_a_learner_s_does():
    niw, x = NIW(small_model(), lr=0.1), torch.randn(7, 10)
    twin, learner = copy.deepcopy(niw), niw.clone()
    for own in (twin, learner):
        torch.manual_seed(0)
        own.adapt(own(x).square().mean(), True, None, None, 3)
    assert all(torch.equal(a, b) for a, b in zip(twin.module.parameters(), learner.module.parameters()))


def test_a_cloned_learner_goes_on_alone():
    niw, x = NIW(small_model(), lr=0.1), torch.randn(7, 10)
    learner = niw.clone()
    learner.adapt(learner(x).norm())
    twin = learner.clone()
    outputs = learner(x)
    assert torch.equal(twin(x), outputs)
    twin.adapt(twin(x).norm())
    assert torch.equal(learner(x), outputs)
    assert not torch.equal(twin(x), outputs)


def test_train_and_eval_reach_the_learner_and_dropout():
    niw, x = NIW(nn.Sequential(nn.Linear(10, 50), nn.Dropout(0.5)), lr=0.1, temperature=0.0), torch.randn(3, 10)
    niw.eval()
    learner = niw.clone()
    assert not learner.module.training
    assert torch.equal(learner(x), learner(x))
    learner.train()
    assert not torch.equal(learner(x), learner(x))


def test_batchnorm_statistics_are_shared_as_in_maml_and_untouched_by_predict():
    niw = NIW(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), lr=0.1)
    x = torch.randn(8, 4)
    learner = niw.clone()
    learner.adapt(learner(x).norm())
    assert niw.module[1].num_batches_tracked == 1
    before = niw.module[1].running_mean.clone()
    learner.posterior().predict(x, samples=4)
    assert torch.equal(niw.module[1].running_mean, before)
    niw.eval()
    evaluation = niw.clone()
    evaluation.eval()
    evaluation.adapt(evaluation(x).norm())
    assert torch.equal(niw.module[1].running_mean, before)


def test_query_sets_of_any_size_and_regression_targets():
    niw = NIW(nn.Linear(2, 3), lr=0.1)
    for support, query in ((1, 7), (9, 2)):
        learner = niw.clone()
        learner.adapt((learner(torch.randn(support, 2)) - 1).square().mean())
        assert learner(torch.randn(query, 2)).shape == (query, 3)


def test_losses_after_several_steps_can_be_summed():
    """MAML++'s multi-step loss: each step's query loss keeps the posterior of its own step."""
    niw, x = NIW(small_model(), lr=0.1, add_kl_gradient=False), torch.randn(7, 10)

    def gradient(keep):
        torch.manual_seed(1)
        niw.zero_grad()
        learner, losses = niw.clone(), []
        for _ in range(4):
            learner.adapt(learner(x).norm())
            losses.append(learner(x).square().mean())
        sum(losses[i] for i in keep).backward()
        return torch.cat([p.grad.flatten() for p in niw.module.parameters()])

    together = gradient([0, 1, 2, 3])
    alone = sum(gradient([i]) for i in range(4))
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-6)


@contextlib.contextmanager
def no_garbage_collector():
    """Only reference counts free memory here."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def storages(tensors):
    return [StorageWeakRef(t.untyped_storage()) for t in tensors]


def episode(niw, use, activations=None):
    """An adapted learner, after what `use` says was done with it."""
    x, y = torch.randn(7, 10), torch.randint(4, (7,))
    learner = niw.clone()
    if activations is not None:
        learner.module[1].register_forward_hook(lambda module, args, out: activations.extend(storages([out])))
    for _ in range(3):
        learner.adapt(nn.functional.cross_entropy(learner(x), y))
    if use != "adapted":
        loss = nn.functional.cross_entropy(learner(torch.randn(9, 10)), torch.randint(4, (9,)))
        if use == "backward":
            loss.backward()
        elif use == "posterior":
            (learner.posterior().mean["0.weight"].sum() + learner.kl() + loss).backward()
        elif use == "failed":
            with pytest.raises(RuntimeError):
                learner.adapt(loss * float("nan"))
        elif use == "clone":
            learner = learner.clone()
            learner.adapt(nn.functional.cross_entropy(learner(x), y))
    return learner


USES = ["adapted", "query", "backward", "posterior", "failed", "clone"]


@every_order
@every_inference
@pytest.mark.parametrize("use", USES)
def test_a_dropped_learner_frees_its_weights_and_its_graph_at_once(use, inference, second_order):
    with no_garbage_collector():
        niw, activations = NIW(small_model(), lr=0.1, inference=inference, second_order=second_order), []
        learner = episode(niw, use, activations)
        niw.clone()  # diagnostics are of the newest episode until the next begins
        weights = storages(learner.parameters())
        objects = [weakref.ref(o) for o in (learner, learner.module, *learner.parameters())]
        assert not any(ref.expired() for ref in weights)
        del learner
        assert all(ref() is None for ref in objects)
        assert all(ref.expired() for ref in weights)
        assert activations
        assert all(ref.expired() for ref in activations)


@every_order
@pytest.mark.parametrize("curvature", ["sgld", GGN()], ids=["sgld", "ggn"])
@pytest.mark.parametrize("average_iterates", [False, True])
def test_so_it_does_with_any_curvature_and_average(average_iterates, curvature, second_order):
    with no_garbage_collector():
        options = {"average_iterates": average_iterates, "curvature": curvature, "second_order": second_order}
        niw, activations = NIW(small_model(), lr=0.1, **options), []
        learner = episode(niw, "backward", activations)
        niw.clone()
        weights = storages(learner.parameters())
        del learner
        assert all(ref.expired() for ref in (*weights, *activations))


def tensors_of(nest, seen=None):
    """Every tensor that an object holds, however deep."""
    seen = set() if seen is None else seen
    if id(nest) in seen:
        return []
    seen.add(id(nest))
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, dict):
        nest = list(nest.values())
    if isinstance(nest, (list, tuple, set)):
        return [t for part in nest for t in tensors_of(part, seen)]
    return tensors_of(vars(nest), seen) if hasattr(nest, "__dict__") and not isinstance(nest, type) else []


@every_order
@every_inference
@pytest.mark.parametrize("use", USES)
def test_a_wrapper_holds_no_graph_of_its_newest_episode(use, inference, second_order):
    with no_garbage_collector():
        niw, activations = NIW(small_model(), lr=0.1, inference=inference, second_order=second_order), []
        learner = episode(niw, use, activations)
        assert niw.diagnostics()["layers"]
        del learner
        assert all(ref.expired() for ref in activations)
        held = tensors_of(niw)
        assert len(held) > 12  # with those of the newest chain
        assert all(t.grad_fn is None for t in held)
        assert niw.diagnostics()["layers"]


@every_order
@every_inference
def test_a_pickled_wrapper_is_as_large_after_an_episode_as_before(inference, second_order):
    niw = NIW(small_model(), lr=0.1, inference=inference, second_order=second_order)
    fresh = len(pickle.dumps(niw))
    learner = episode(niw, "query")
    niw.zero_grad()
    after = len(pickle.dumps(niw))
    assert abs(after - fresh) < 200  # the last layer's name, and what was warned of
    del learner
    episode(niw, "query")
    assert len(pickle.dumps(niw)) == after


def test_a_dropped_wrapper_frees_its_parameters_at_once():
    with no_garbage_collector():
        niw = NIW(small_model(), lr=0.1)
        learner = episode(niw, "backward")
        held = storages(niw.parameters())
        del learner, niw
        assert all(ref.expired() for ref in held)


def test_many_episodes_leave_nothing_behind():
    with no_garbage_collector():
        niw = NIW(small_model(), lr=0.1)
        refs = []
        for _ in range(10):
            learner = episode(niw, "backward")
            refs += storages(learner.parameters())
        del learner
        niw.clone()
        assert all(ref.expired() for ref in refs)
        assert len(niw._warned) <= 1


@every_order
@every_inference
@pytest.mark.parametrize("curvature", ["sgld", GGN("gaussian")], ids=["sgld", "ggn"])
@pytest.mark.parametrize("average_iterates", [False, True])
def test_no_step_waits_for_a_device(average_iterates, curvature, inference, second_order):
    """The meta device has no values, and torch raises where one is looked at."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    options = {"inference": inference, "second_order": second_order, "average_iterates": average_iterates}
    niw = NIW(model, lr=0.1, curvature=curvature, **options).to("meta")
    niw.hyper.initial_log_variance = torch.tensor(-1.0)  # looked at once per episode
    x = torch.randn(4, 3, device="meta")
    learner = niw.clone()
    for _ in range(4):
        learner.adapt(learner(x).square().mean())
    assert learner(torch.randn(6, 3, device="meta")).shape == (6, 2)
    assert learner.query(x).shape == (4, 2)
