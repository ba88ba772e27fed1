"""Image classifiers side by side: methods, runs and the command line, on drawn data."""

import json
import math
import os
import signal
from dataclasses import replace

import pytest
import torch
from drawings import SMALL, draw_cifarfs
from torch import nn
from torch.nn import functional as F

from l2l_niw.metrics import calibration
from l2l_niw.data import Tasks
from l2l_niw.errors import ArgumentError, CheckpointError, LossError
from l2l_niw.heads import MetaQDA, NearestCentroid, Ridge
from l2l_niw.algorithms.special_cases import maml
from l2l_niw.vision import METHODS, Config, build, evaluate, pretraining, runs, train
from l2l_niw.vision.backbone import Conv4
from l2l_niw.vision.methods import complete, trainable
from l2l_niw.vision.pretraining import load_start, pretrained

import learn2learn as l2l


SMALL_PRETRAINED = replace(SMALL, pretraining=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_cifarfs(tmp_path_factory.mktemp("data"))


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["module"]


@pytest.mark.parametrize("name", trainable(SMALL_PRETRAINED))
def test_every_method_trains_and_is_scored(name, data, cache, tmp_path):
    config = replace(SMALL, method=name, pretraining=int(METHODS[name].fixed))
    log = train(config, tmp_path, data)
    assert [line["iteration"] for line in log] == [2, 4]
    method = build(config)
    if config.pretraining:
        load_start(method.backbones[0], config, data)
    start = method.module.state_dict()
    moved = {key for key, value in weights(tmp_path).items() if not torch.equal(value, start[key])}
    trained = {key for key, p in build(config).module.named_parameters() if p.requires_grad}
    # Reptile is NIW without V_0 and n_0; a full posterior of classes has no noise, and here no KL
    latent = ("log_noise", "raw_n0")
    unused = {"reptile": ("log_variance", "raw_n0"), "niw-full": latent, "niw-ncc-rank": latent, "niw-qda-rank": latent}
    unused["niw-qda-2"] = unused["niw-qda-4"] = ("log_weights",)  # of components that are trained in turn
    assert moved == {key for key in trained if not any(part in key for part in unused.get(name, ()))}
    metrics = evaluate(tmp_path, data)
    assert 0 <= metrics["accuracy"] <= 1
    assert metrics["nll"] > 0
    assert metrics["memory"] > 0
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert (tmp_path / "reliability.png").exists()
    assert (tmp_path / "log.csv").read_text().count("\n") == 3


@pytest.mark.parametrize("name", ["niw-ncc", "niw-ridge", "niw-qda"])
def test_with_two_shots_inner_steps_predict_each_image_from_the_others(name):
    model = build(replace(SMALL, method=name, shots=2)).module.module
    x, y = torch.randn(6, 3, 32, 32), torch.arange(3).repeat(2)
    features = model.features(x)
    losses = []
    for i in range(6):
        rest = torch.arange(6) != i
        losses.append(model.head.head(features[rest], y[rest], features[i : i + 1]).nll(y[i : i + 1]))
    torch.testing.assert_close(model(x, y).nll(y), torch.stack(losses).mean())


@pytest.mark.parametrize("name", ["maml", "fomaml", "anil"])
def test_maml_and_its_kin_are_learn2learn_s_own_loops(name):
    config = replace(SMALL, method=name, seed=3)
    method = build(config)
    torch.manual_seed(3)
    body = Conv4(config)
    linear = nn.Linear(body.features, 3)
    for p in linear.parameters():
        nn.init.zeros_(p)  # no class differs from another beforehand
    x, y, x_query, y_query = task = random_task()
    if name == "anil":
        learner = l2l.algorithms.MAML(linear, lr=0.05).clone()
        support, query = body(x), body(x_query)
    else:
        learner = l2l.algorithms.MAML(nn.Sequential(body, linear), lr=0.05, first_order=name == "fomaml").clone()
        support, query = x, x_query
    for _ in range(2):
        learner.adapt(F.cross_entropy(learner(support), y))
    expected = F.cross_entropy(learner(query), y_query)
    expected.backward()
    found, _ = method.loss(task)
    found.backward()
    assert torch.equal(found, expected)
    for own, theirs in zip(method.module.parameters(), (*body.parameters(), *linear.parameters())):
        torch.testing.assert_close(own.grad, theirs.grad)


@pytest.mark.parametrize("fixed", ["", "-fixed"])
@pytest.mark.parametrize(("name", "inference"), [("metaqda", "bayesian"), ("metaqda-map", "map")])
def test_metaqda_is_of_either_inference(name, inference, fixed):
    model = build(replace(SMALL, method=name + fixed, pretraining=1)).module
    assert model.head.inference == inference
    assert all(p.requires_grad != bool(fixed) for p in model.backbone.parameters())


def test_a_batch_is_a_step_of_adam_on_a_cosine_with_the_mean_gradient(data):
    config = complete(replace(SMALL, method="protonet", meta_batch=3))
    tasks = runs.tasksets_of(config, data).train
    training, method = runs.Training(build(config), config), build(config)
    opt = torch.optim.Adam(method.module.parameters())
    for done in range(3):
        training.step(tasks)
        opt.param_groups[0]["lr"] = config.lr * (1 + math.cos(math.pi * done / config.iterations)) / 2
        opt.zero_grad()
        torch.stack([method.loss(tasks[3 * done + k])[0] for k in range(3)]).mean().backward()
        nn.utils.clip_grad_norm_(method.module.parameters(), runs.CLIP)
        gradients = [p.grad for p in method.module.parameters()]
        for own, expected in zip(training.parameters, gradients):
            torch.testing.assert_close(own.grad, expected, atol=1e-5, rtol=1e-3)
        for own, expected in zip(training.parameters, gradients):  # from here on as the other, or rounding would grow
            expected.copy_(own.grad)
        opt.step()
    for own, expected in zip(training.parameters, method.module.parameters()):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("name", ["protonet", "metaqda-4"])
def test_a_gradient_that_is_too_long_is_shortened_for_every_member(name, data):
    config = complete(replace(SMALL, method=name))
    tasks, method = runs.tasksets_of(config, data).train, build(config)
    gradients = []
    for factor in (1e-3, 1e3):
        training = runs.Training(build(config), config)
        for member in training.method.members:
            loss = member.loss
            member.loss = lambda task, loss=loss: (factor * loss(task)[0], loss(task)[1])  # noqa: B023
        training.step(tasks)
        gradients.append(
            [torch.cat([p.grad.flatten() for p in member.module.parameters()]) for member in training.method.members]
        )
    assert len(gradients[0]) == len(method.members)
    for short, long in zip(*gradients):
        assert short.norm() < runs.CLIP
        torch.testing.assert_close(long.norm().item(), runs.CLIP, atol=0, rtol=1e-4)
        torch.testing.assert_close(long / long.norm(), short / short.norm(), atol=1e-4, rtol=1e-3)


def test_scores_are_of_test_tasks_and_the_temperature_of_validation_tasks(data, tmp_path):
    train(replace(SMALL, method="protonet", test_tasks=14), tmp_path, data)
    metrics = evaluate(tmp_path, data)
    training = runs.trained(tmp_path)
    tasksets = runs.tasksets_of(training.config, data)
    found, y = runs.predictions(training.method, tasksets.validation, 12)
    assert metrics["temperature"] == calibration.fit_temperature(found.flatten(0, 1), y.flatten())
    found, y = runs.predictions(training.method, tasksets.test, 14)
    right = (found.argmax(-1) == y).double().mean(1).numpy()
    assert metrics["accuracy"] == pytest.approx(right.mean())
    assert metrics["accuracy_interval"] == pytest.approx(1.96 * right.std(ddof=1) / 14**0.5)
    assert metrics["nll"] == pytest.approx(calibration.nll(found.flatten(0, 1), y.flatten()))


def test_predictions_that_are_nan_are_a_training_that_has_diverged(data, tmp_path):
    train(replace(SMALL, method="protonet"), tmp_path, data)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    next(iter(state["module"].values())).fill_(math.nan)
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(LossError, match="diverged"):
        evaluate(tmp_path, data)
    assert not (tmp_path / "metrics.json").exists()


def random_task():
    return Tasks(torch.rand(3, 3, 32, 32), torch.arange(3), torch.rand(6, 3, 32, 32), torch.arange(3).repeat(2))


def test_niw_at_no_temperature_and_with_full_graphs_is_maml_in_the_same_loop():
    """The swap and nothing else: special settings of NIW in the loop of `niw` give the gradients of `maml`."""
    task, expected = random_task(), build(replace(SMALL, method="maml"))
    loss, _ = expected.loss(task)
    loss.backward()
    found = build(replace(SMALL, method="niw"))
    found.module = maml(found.module.module, lr=0.05)
    own, _ = found.loss(task)
    own.backward()
    assert torch.allclose(own, loss, atol=1e-6)
    for p, q in zip(found.module.module.parameters(), expected.module.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-5)


def test_niw_averages_probabilities_over_posterior_samples():
    method, task = build(replace(SMALL, method="niw", samples=3, temperature=1.0)), random_task()
    torch.manual_seed(0)
    found = method.log_probabilities(task)
    torch.manual_seed(0)
    outputs = method.adapted(task.x, task.y).posterior().predict(task.x_query, samples=3)
    assert torch.allclose(found.exp(), outputs.softmax(-1).mean(0), atol=1e-6)
    assert outputs.std(0).max() > 1e-3


def test_heads_under_niw_average_over_posterior_samples_that_are_inferred_at_meta_test():
    method, task = build(replace(SMALL, method="niw-ncc", samples=3, prior_std=0.2)), random_task()
    torch.manual_seed(0)
    found = method.log_probabilities(task)
    torch.manual_seed(0)
    niw = method.module
    posterior = niw.clone().posterior(lambda net: net(task.x, task.y).nll(task.y), steps=2)
    networks = []
    with torch.no_grad():
        for _ in range(3):
            network = posterior.network(posterior.sample())
            networks.append(network(task.x, task.y, task.x_query).probs)
    torch.testing.assert_close(found.exp(), torch.stack(networks).mean(0))
    assert torch.stack(networks).std(0).max() > 1e-3
    at_start = next(iter(niw.prior().variance.values()))
    assert torch.allclose(at_start, torch.full_like(at_start, 0.2**2 / (1 + 3)))  # n_0 is 1: the mode's


def test_reptile_goes_toward_the_end_of_plain_gradient_descent():
    config = replace(SMALL, method="reptile")
    method, plain = build(config), build(config).module.module
    task = random_task()
    loss, _ = method.loss(task)
    loss.backward()
    start = [p.detach().clone() for p in plain.parameters()]
    x, y = torch.cat([task.x, task.x_query]), torch.cat([task.y, task.y_query])
    opt = torch.optim.SGD(plain.parameters(), 0.05)
    for _ in range(2):
        opt.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        opt.step()
    for before, after, own in zip(start, plain.parameters(), method.module.module.parameters()):
        assert torch.allclose(own.grad, before - after, atol=1e-6)


@pytest.mark.parametrize("name", ["niw", "maml"])
def test_a_run_that_is_stopped_ends_as_one_that_is_not(name, data, tmp_path, monkeypatch):
    config = replace(SMALL, method=name)
    train(config, tmp_path / "whole", data)
    step = runs.Training.step

    def interrupted(self, tasks):
        step(self, tasks)
        if self.done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(runs.Training, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", data)
    monkeypatch.setattr(runs.Training, "step", step)
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["done"] == 3
    with pytest.raises(CheckpointError, match="3 of 4 iterations"):
        evaluate(tmp_path / "parts", data)
    torch.manual_seed(99)
    log = train(config, tmp_path / "parts", data)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    lines = [(tmp_path / run / "log.csv").read_text().splitlines() for run in ("whole", "parts")]
    drop = [[line.split(",")[:1] + line.split(",")[2:] for line in each] for each in lines]  # all but the seconds
    assert drop[0] == drop[1]
    assert len(log) == 2


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of torch's."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hub" / "l2l_niw"


def test_each_split_is_for_what_its_name_says(data, cache, tmp_path, monkeypatch):
    config = complete(replace(SMALL, method="protonet", pretraining=1))
    tasksets, seen = runs.tasksets_of(config, data), []
    monkeypatch.setattr(runs, "tasksets_of", lambda *a: tasksets)
    step, validate, load = runs.Training.step, runs.Training.validate, pretraining.load_images
    monkeypatch.setattr(runs.Training, "step", lambda own, tasks: seen.append(("step", tasks)) or step(own, tasks))
    monkeypatch.setattr(
        runs.Training, "validate", lambda own, tasks: seen.append(("validate", tasks)) or validate(own, tasks)
    )
    monkeypatch.setattr(pretraining, "load_images", lambda *a: seen.append(("pretrain", a[1])) or load(*a))
    looked = pretraining.Pretraining.validate
    monkeypatch.setattr(
        pretraining.Pretraining, "validate", lambda own, images: seen.append(("look", images)) or looked(own, images)
    )
    train(config, tmp_path / "run", data)
    classes = {what: {id(given) for own, given in seen if own == what} for what, _ in seen}
    assert classes["step"] == {id(tasksets.train)}
    assert classes["validate"] == {id(tasksets.validation)}
    assert {given for own, given in seen if own == "pretrain"} == {"train", "validation"}
    validation = load(config.dataset, "validation", data, False)
    assert all(torch.equal(given.pixels, validation.pixels) for own, given in seen if own == "look")


def test_validation_rounds_are_no_training_time(data, tmp_path, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(runs.time, "perf_counter", lambda: float(next(clock)))
    validate = runs.Training.validate

    def slow_validate(own, tasks):
        for _ in range(1000):
            next(clock)
        return validate(own, tasks)

    monkeypatch.setattr(runs.Training, "validate", slow_validate)
    log = train(replace(SMALL, method="protonet"), tmp_path, data)
    assert [line["iteration"] for line in log] == [2, 4]
    assert 0 < log[-1]["seconds"] < 100


@pytest.mark.parametrize(
    ("name", "head"),
    [("protonet", NearestCentroid), ("ridge", Ridge), ("metaqda", MetaQDA), ("metaqda-map", MetaQDA)],
)
def test_a_method_has_the_head_of_its_name_and_under_niw_its_baseline_s(name, head):
    own = build(replace(SMALL, method=name)).module.head
    assert type(own) is head
    under = [method for method in trainable(SMALL) if METHODS[method].baseline == name]
    assert bool(under) == (name != "metaqda-map")
    for method in under:
        theirs = build(replace(SMALL, method=method)).module.module.head
        assert type(theirs) is head
        assert theirs.state_dict().keys() == own.state_dict().keys()
        assert all(torch.equal(theirs.state_dict()[key], value) for key, value in own.state_dict().items())
        assert getattr(theirs, "inference", None) == getattr(own, "inference", None)


def test_a_fixed_backbone_has_to_be_pretrained(data, tmp_path):
    with pytest.raises(ArgumentError, match="metaqda-fixed: pretraining must be 1 or more"):
        train(replace(SMALL, method="metaqda-fixed"), tmp_path / "run", data)
    assert not (tmp_path / "run").exists()


def test_a_log_that_was_cut_off_is_named(data, tmp_path):
    train(replace(SMALL, method="protonet"), tmp_path, data)
    path = tmp_path / "log.csv"
    path.write_text(path.read_text()[:-30])
    with pytest.raises(CheckpointError, match="log.csv cannot be read"):
        runs.read_log(tmp_path)


def test_every_method_begins_with_the_same_pretrained_backbone_which_is_made_once(data, cache, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(runs.Training, "step", lambda self, tasks: begun.append(self) or 1 / 0)
    for name in ("maml", "anil", "reptile", "protonet", "niw", "niw-ncc"):
        with pytest.raises(ZeroDivisionError):
            train(replace(SMALL, method=name, pretraining=1), tmp_path / name, data)
        monkeypatch.setattr(pretraining, "pretrain", None)  # a second one would fail
    start = pretrained(SMALL_PRETRAINED, SMALL.seed, data)
    for training in begun:
        own = training.method.backbones[0].state_dict()
        assert len(own) > 10
        assert all(torch.equal(value, start[key]) for key, value in own.items())
    assert [path.suffix for path in cache.glob("cifarfs-*")] == [".safetensors"]


def test_a_finished_run_is_not_trained_again_and_another_s_folder_is_refused(data, tmp_path, monkeypatch):
    train(SMALL, tmp_path, data)
    monkeypatch.setattr(runs.Training, "step", lambda *a: pytest.fail("it was trained again"))
    train(SMALL, tmp_path, data)
    with pytest.raises(CheckpointError, match="a run with filters = 4, not 8"):
        train(replace(SMALL, filters=8), tmp_path, data)
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((tmp_path / "config.json").read_text()), "ways": 4}))
    with pytest.raises(CheckpointError, match="another network"):
        evaluate(tmp_path, data)


def test_other_numbers_of_samples_leave_the_run_s_own_scores_alone(data, tmp_path):
    train(replace(SMALL, method="niw"), tmp_path, data)
    own = evaluate(tmp_path, data)
    other = evaluate(tmp_path, data, samples=5)
    assert (own["samples"], other["samples"]) == (2, 5)
    assert json.loads((tmp_path / "metrics.json").read_text()) == own
    assert json.loads((tmp_path / "metrics-samples-5.json").read_text()) == other
    train(replace(SMALL, method="maml"), tmp_path / "maml", data)
    with pytest.raises(ArgumentError, match="maml has no posterior"):
        evaluate(tmp_path / "maml", data, samples=5)


def test_a_config_has_what_its_method_has_and_nothing_else():
    found = complete(Config(method="protonet", inner_lr=0.3, steps=4, temperature=0.1))
    assert (found.lr, found.inner_lr, found.steps, found.temperature) == (0.001, None, None, None)
    found = complete(Config(method="niw", inner_lr=0.3))
    assert (found.lr, found.inner_lr, found.steps, found.temperature) == (0.001, 0.3, 5, 1e-4)
    assert (found.prior_std, found.samples) == (None, 5)


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"ways": 5')
    with pytest.raises(CheckpointError, match="config.json cannot be read: .* Restore the file"):
        Config.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "svm"}, "method must be one of maml"),
        ({"dataset": "mnist"}, "dataset must be one of omniglot"),
    ],
)
def test_unknown_names_are_refused_before_any_work(change, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        train(replace(SMALL, **change), tmp_path / "run", tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"ways": 1},
        {"lr": 0.0},
        {"inner_lr": -1.0},
        {"steps": 0},
        {"steps": 1.5},
        {"test_tasks": 1},
        {"seed": -1},
        {"temperature": -1.0},
        {"backbones": 0},
        {"batchnorm": "none"},
        {"batchnorm": "running", "pretraining": 0},
        {"precision": "float16"},
    ],
)
def test_numbers_outside_their_domain_are_named(change):
    with pytest.raises(ArgumentError, match=next(iter(change))):
        replace(SMALL, **change)


def test_components_that_share_tasks_have_equal_shares():
    with pytest.raises(ArgumentError, match="meta_batch must be a multiple of 2 for niw-qda-2"):
        complete(replace(SMALL, method="niw-qda-2", meta_batch=1))


def test_gradients_that_are_not_finite_stop_a_training(data, tmp_path):
    with pytest.raises(LossError, match="not finite"):
        train(replace(SMALL, method="fomaml", inner_lr=1e30), tmp_path, data)
