"""Methods on the last blocks of a transformer, of images and of texts."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from drawings import SMALL, draw_cifarfs
from small_transformers import WIDTH, draw_clinc150, use_small_transformers

from l2l_niw import NIW
from l2l_niw.errors import ArgumentError, DataError
from l2l_niw.reports import report
from l2l_niw.vision import METHODS, build, evaluate, train, transformers
from l2l_niw.vision.backbone import make_backbone
from l2l_niw.vision.methods import complete, trainable
from l2l_niw.vision.pretraining import load_start
from l2l_niw.vision.runs import Training
from l2l_niw.vision.shift import OF_TEXTS, evaluate_shift
from l2l_niw.vision.tasks import raw_tasksets, tasksets_of

IMAGES = replace(SMALL, backbone="dinov2")
TEXTS = replace(SMALL, backbone="minilm", dataset="clinc150")
KINDS = {"images": IMAGES, "texts": TEXTS}
WHOLE = {"images": "dinov2", "texts": "minilm"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_clinc150(draw_cifarfs(tmp_path_factory.mktemp("data")))


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path_factory):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))
    use_small_transformers(monkeypatch, tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_part_and_last_blocks_are_the_whole_network(kind, data):
    config = replace(KINDS[kind], blocks=2)
    body = make_backbone(config)
    load_start(body, config, data)
    task, raw = tasksets_of(config, data).test[3], raw_tasksets(config, data).test[3]
    with torch.no_grad():
        expected = transformers.TRANSFORMERS[WHOLE[kind]].blocks(data)(raw.x_query)
        found = body(task.x_query)
    assert found.shape == (6, WIDTH)
    torch.testing.assert_close(found.square().sum(-1), torch.full((6,), float(WIDTH)))
    expected = WIDTH**0.5 * expected / expected.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)  # float16 on disk


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), zip(trainable(IMAGES), cycle(KINDS)))
def test_every_method_trains_the_last_block_and_is_scored(name, kind, data, tmp_path):
    config = complete(replace(KINDS[kind], method=name, iterations=2, validations=1))
    train(config, tmp_path, data)
    method = build(config)
    assert all(body.features == WIDTH for body in method.backbones)
    start = transformers.TRANSFORMERS[WHOLE[kind]].blocks(data).state_dict()
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["module"]
    own = {key: value for key, value in state.items() if "mlp.fc1.weight" in key or "intermediate.dense.weight" in key}
    own |= {key: value for key, value in state.items() if key.endswith("base_layer.weight")}
    assert own
    moved = [
        not torch.equal(value, start[next(k for k in start if stem(key).endswith(k))]) for key, value in own.items()
    ]
    assert any(moved) == (not METHODS[name].fixed)
    assert 0 <= evaluate(tmp_path, data)["accuracy"] <= 1


def stem(key):
    return key.replace(".base_layer.", ".")


def test_texts_out_of_scope_are_told_apart(data, tmp_path):
    folder = tmp_path / "runs" / "protonet-0"
    train(replace(TEXTS, method="protonet"), folder, data)
    evaluate(folder, data)
    found = evaluate_shift(folder, data)
    assert list(found) == list(OF_TEXTS)
    assert found["open set"]["auroc"] is not None
    assert found["open set"]["accuracy"] == found["in domain"]["accuracy"]
    page = report(tmp_path)
    assert "## Out of scope" in page
    assert "| AUROC, open set | FPR95 % | AURC |" in page
    assert "Conv-4" not in page
    assert "Corruptions" not in page


@pytest.mark.parametrize("one_domain", [False, True])
def test_classes_of_a_task_are_of_one_domain_if_the_data_set_says_so(one_domain, data):
    config = replace(TEXTS, dataset="clinc150-domains" if one_domain else "clinc150")
    groups = [raw_tasksets(config, data).train.groups is not None for _ in range(2)]
    assert groups == [one_domain] * 2


def test_padding_changes_no_features():
    body = make_backbone(TEXTS)
    hidden = torch.randn(2, 5, WIDTH)
    hidden[0, 3:] = 0
    longer = torch.cat([hidden, torch.zeros(2, 4, WIDTH)], 1)
    with torch.no_grad():
        torch.testing.assert_close(body(longer), body(hidden))


@pytest.mark.parametrize("name", ["protonet", "niw-ncc", "maml"])
def test_a_transformer_has_a_smaller_learning_rate_than_what_is_new(name, data):
    config = complete(replace(TEXTS, method=name, lr=0.1))
    training = Training(build(config), config)
    before = {key: value.clone() for key, value in training.method.module.state_dict().items()}
    training.step(tasksets_of(config, data).train)
    after = training.method.module.state_dict()
    moved = {key: (after[key].double() - before[key].double()).abs().max().item() for key in after}
    rate = make_backbone(config).rate
    body = [value for key, value in moved.items() if "LayerNorm.bias" in key and "hyper" not in key]
    assert body == pytest.approx([0.1 * rate] * len(body), rel=0.05)
    new = max(value for key, value in moved.items() if "layer" not in key)
    assert new == pytest.approx(0.1, rel=0.05)  # a step of Adam


def test_tasks_differ_by_adapters_and_all_else_is_shared(data):
    method = build(complete(replace(TEXTS, method="niw-ncc-lora")))
    assert isinstance(method.module, NIW)
    tasks = tasksets_of(TEXTS, data)
    names = method.posterior(tasks.test[0]).mean
    assert names
    assert all("lora_" in name for name in names)
    loss, _ = method.loss(tasks.train[0])
    loss.backward()
    shared = [p for key, p in method.module.module.named_parameters() if "base_layer.weight" in key]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in shared)


def test_what_cannot_be_is_named(data, tmp_path):
    for changes, message in (
        ({"backbone": "minilm"}, "backbone is minilm and dataset cifarfs"),
        ({"dataset": "clinc150"}, "backbone is conv4 and dataset clinc150"),
        ({"backbone": "dinov2", "pretraining": 3}, "dinov2 is pretrained"),
        ({"backbone": "resnet"}, "backbone must be one of"),
    ):
        with pytest.raises(ArgumentError, match=message):
            replace(SMALL, **changes)
    with pytest.raises(ArgumentError, match="blocks is 4, but dinov2 has 3"):
        make_backbone(replace(IMAGES, blocks=4))
    for name, config in (("niw-ncc-lora", SMALL), ("maml-batch", IMAGES)):
        with pytest.raises(ArgumentError, match=f"{name}: backbone must be"):
            complete(replace(config, method=name))
    with pytest.raises(DataError, match="No DINOv2: looked for"):
        transformers.dinov2(tmp_path)
