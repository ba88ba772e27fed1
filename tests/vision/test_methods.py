"""What methods predict, against the same written out."""

import math
from dataclasses import replace

import pytest
import torch
from drawings import SMALL, draw_cifarfs
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from l2l_niw.algorithms import NIWMixture
from l2l_niw.data import Tasks
from l2l_niw.vision import METHODS, build, runs
from l2l_niw.vision.loops import Episodic
from l2l_niw.vision.methods import complete

FIXED = replace(SMALL, pretraining=1)


def random_task(ways=3, shots=1):
    torch.manual_seed(5)
    y = torch.arange(ways).repeat(shots)
    return Tasks(torch.rand(ways * shots, 3, 32, 32), y, torch.rand(6, 3, 32, 32), torch.arange(ways).repeat(6 // ways))


def centred(method, images):
    with torch.no_grad():
        features = method.backbones[0](images) - method.module.center
    return features / features.norm(dim=-1, keepdim=True)


def test_simpleshot_is_the_nearest_centroid_of_centred_features_of_length_one():
    method, task = build(replace(FIXED, method="simpleshot")), random_task(shots=2)
    with torch.no_grad():
        method.module.center.copy_(torch.randn(method.module.center.shape) * 0.1)
        method.module.log_scale.fill_(math.log(3.0))
    support, query = centred(method, task.x), centred(method, task.x_query)
    centers = torch.stack([support[task.y == c].mean(0) for c in range(3)])
    expected = (-3.0 * (query.unsqueeze(1) - centers).square().sum(-1)).log_softmax(-1)
    torch.testing.assert_close(method.log_probabilities(task), expected, atol=1e-4, rtol=1e-4)


def test_the_linear_classifier_goes_toward_logistic_regression():
    method, task = build(replace(FIXED, method="linear", steps=20_000, inner_lr=4.0)), random_task(shots=20)
    with torch.no_grad():
        method.module.log_scale.fill_(0.0)
        method.module.center.copy_(torch.randn(method.module.center.shape))
    support = centred(method, task.x).numpy()
    expected = LogisticRegression(C=math.inf, tol=1e-6, max_iter=10_000).fit(support, task.y.numpy())
    logits = method.logits(centred(method, task.x), task.y, centred(method, task.x))
    found = F.cross_entropy(logits, task.y).item()
    probabilities = torch.from_numpy(expected.predict_proba(support)).log()
    assert found == pytest.approx(F.nll_loss(probabilities, task.y).item(), abs=0.02)


@pytest.mark.parametrize("name", ["simpleshot", "linear"])
def test_what_a_fixed_backbone_learns_is_a_scale_and_a_centre(name):
    method, task = build(replace(FIXED, method=name)), random_task()
    loss, logits = method.loss(task)
    loss.backward()
    assert {key for key, p in method.module.named_parameters() if p.grad is not None} == {"center", "log_scale"}
    torch.testing.assert_close(F.cross_entropy(logits, task.y_query), loss)
    torch.testing.assert_close(method.log_probabilities(task), logits.detach().log_softmax(-1))


def test_metaoptnet_is_learn2learn_s_svm():
    import learn2learn as l2l

    method, task = build(replace(SMALL, method="metaoptnet")), random_task(shots=2)
    body = method.backbones[0]
    machine = l2l.nn.SVClassifier(body(task.x), task.y.int(), 3, normalize=True)
    expected = (10.0 * machine(body(task.x_query))).log_softmax(-1)
    torch.testing.assert_close(method.log_probabilities(task), expected.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["maml", "protonet"])
def test_a_transductive_row_has_the_query_s_statistics_whatever_the_others_have(name):
    config, task = replace(FIXED, batchnorm="running"), random_task()
    one = task._replace(x_query=task.x_query[:2], y_query=task.y_query[:2])
    for method, alone in ((name, True), (f"{name}-batch", False)):
        own = build(replace(config, method=method))
        found = own.log_probabilities(one), own.log_probabilities(task)[:2]
        assert torch.allclose(*found, atol=1e-5) == alone


def test_an_ensemble_averages_probabilities_of_members_that_are_trained_on_tasks_of_their_own(tmp_path):
    config = complete(replace(SMALL, method="metaqda-4", meta_batch=2))
    method, task = build(config), random_task()
    assert len(method.members) == METHODS["metaqda-4"].components == 4
    expected = torch.stack([member.log_probabilities(task).exp() for member in method.members]).mean(0)
    assert torch.stack([m.log_probabilities(task) for m in method.members]).std(0).max() > 1e-3
    torch.testing.assert_close(method.log_probabilities(task).exp(), expected)
    tasks = runs.tasksets_of(config, draw_cifarfs(tmp_path)).train
    training, alone = runs.Training(method, config), build(config)
    training.step(tasks)
    for k, member in enumerate(alone.members):
        losses = [member.loss(tasks[number])[0] for number in (k, k + 4)]
        torch.stack(losses).mean().backward()
        for own, p in zip(method.members[k].module.parameters(), member.module.parameters()):
            torch.testing.assert_close(own.grad, p.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("name", "tasks_each"), [("niw-qda-4", 2), ("niw-qda-2", 1)])
def test_a_mixture_s_components_have_as_many_tasks_each_as_another_method_or_share_them(
    name, tasks_each, tmp_path, monkeypatch
):
    config = complete(replace(SMALL, method=name, meta_batch=2))
    method, seen = build(config), []
    assert isinstance(method.module, NIWMixture)
    members = method.members
    assert [member.module for member in members] == list(method.module.components)
    loss = Episodic.loss
    monkeypatch.setattr(Episodic, "loss", lambda self, task: seen.append(self.module) or loss(self, task))
    training = runs.Training(method, config)
    training.step(runs.tasksets_of(config, draw_cifarfs(tmp_path)).train)
    assert [seen.count(part) for part in method.module.components] == [tasks_each] * len(members)


def test_a_mixture_predicts_by_the_support_s_evidence():
    method, task = build(replace(SMALL, method="niw-qda-2", samples=4)), random_task()
    torch.manual_seed(0)
    found = method.log_probabilities(task)
    torch.manual_seed(0)
    post = method.posterior(task)
    with torch.no_grad():
        expected = post.predict(task.x, task.y, task.x_query, samples=4).logits
    assert post.responsibilities.shape == (2,)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["niw-ncc-rank", "niw-qda-rank"])
def test_heads_of_low_rank_take_the_steps_of_training_at_meta_test(name):
    method, task = build(replace(SMALL, method=name, shots=2, steps=1, samples=1)), random_task(shots=2)
    learner = method.module.clone()
    learner.adapt(learner(task.x, task.y).nll(task.y))
    post = method.posterior(task)
    for key, value in learner.posterior().mean.items():
        torch.testing.assert_close(post.mean[key], value.detach(), atol=1e-5, rtol=1e-4)
    assert all(key.startswith("backbone.1.3.") for key in post.mean)


def test_directions_have_a_smaller_learning_rate_than_the_network(tmp_path):
    """U moves by a hundredth of what the weights move by, which is Adam's learning rate in the first step."""
    config = complete(replace(SMALL, method="niw-ncc-rank", shots=2, lr=0.01))
    training = runs.Training(build(config), config)
    hyper, weight = training.method.module.hyper, training.method.module.module.backbone[1][0].conv.weight
    before = [t.detach().clone() for t in (hyper.directions[0], weight)]
    training.step(runs.tasksets_of(config, draw_cifarfs(tmp_path)).train)
    moved = [(t - old).abs().max().item() for t, old in zip((hyper.directions[0], weight), before)]
    assert moved == pytest.approx([0.01 * 0.01, 0.01], rel=0.05)
    assert sum(len(group["params"]) for group in training.opt.param_groups) == len(training.parameters)
