"""Backbones: learn2learn's own, ours and timm's, and BatchNorm under sampled weights."""

import subprocess
import sys

import learn2learn as l2l
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.func import functional_call, vmap

from l2l_niw import NIW, EpisodicModel
from l2l_niw.errors import ArgumentError, CheckpointError, ExtraError, ModelError
from l2l_niw.heads import CNP, Linear, NearestCentroid, Ridge
from l2l_niw.models import MLP, PoseEncoder, batch_statistics, load_checkpoint, timm_backbone


def images(n, channels=3, size=32):
    return torch.randn(n, channels, size, size)


def three_steps(model, x, y, x_query, y_query, **options):
    """An episode as the paper's authors ran it on a ViT: 3 steps, no burn-in, 2 samples at test."""
    niw = NIW(model, lr=1e-3, average_iterates=True, **options)
    learner = niw.clone()
    for _ in range(3):
        learner.adapt(learner(x, y).nll(y))
    learner(x, y, x_query, y_query).loss(y_query).backward()
    assert all(torch.isfinite(p.grad).all() for p in niw.parameters() if p.requires_grad)
    return learner.posterior().predict(x, y, x_query, samples=2)


BACKBONES = {
    "cnn4": lambda: (l2l.vision.models.CNN4Backbone(hidden_size=8, channels=3, max_pool=True), images(4), images(6)),
    "omniglot": lambda: (l2l.vision.models.OmniglotCNN(16, hidden_size=8), images(4, 1, 28), images(6, 1, 28)),
    "resnet12": lambda: (l2l.vision.models.ResNet12Backbone(wider=False), images(2, size=84), images(2, size=84)),
    "resnet18": lambda: (timm_backbone("resnet18"), images(4), images(6)),
    "vit": lambda: (timm_backbone("dino-small", img_size=32, patch_size=16, depth=2), images(4), images(6)),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_takes_an_episode(name):
    backbone, x, x_query = BACKBONES[name]()
    y, y_query = torch.arange(len(x)) % 2, torch.arange(len(x_query)) % 2
    prediction = three_steps(EpisodicModel(backbone, NearestCentroid("cosine", scale=10.0)), x, y, x_query, y_query)
    assert prediction.probs.shape == (len(x_query), 2)
    assert torch.allclose(prediction.probs.sum(-1), torch.ones(len(x_query)))


@pytest.mark.slow
def test_a_wide_resnet_adapts_its_last_layer():
    """All of its 36 million weights would take a minute."""
    backbone = l2l.vision.models.WRN28Backbone(dropout=0.0).requires_grad_(False)
    backbone.bn1.requires_grad_(True)
    model, y = EpisodicModel(backbone, NearestCentroid("cosine", scale=10.0)), torch.arange(2)
    x, x_query = images(2, size=84), images(2, size=84)
    prediction = three_steps(model, x, y, x_query, y, allow_nograd=True)
    assert prediction.probs.shape == (2, 2)


@pytest.mark.parametrize("name", ["cnn4", "vit"])
def test_second_order_maml_runs_on_the_same_models(name):
    backbone, x, x_query = BACKBONES[name]()
    y, y_query = torch.arange(len(x)) % 2, torch.arange(len(x_query)) % 2
    maml = l2l.algorithms.MAML(EpisodicModel(backbone, NearestCentroid()), lr=1e-3)
    learner = maml.clone()
    learner.adapt(learner(x, y).nll(y))
    learner(x, y, x_query).nll(y_query).backward()
    assert all(torch.isfinite(p.grad).all() for p in maml.parameters())


@pytest.mark.parametrize(("name", "width", "depth"), [("dino-small", 384, 12), ("dino-base", 768, 12)])
def test_dinos_are_timms_vits(name, width, depth):
    with torch.device("meta"):  # shapes only
        backbone = timm_backbone(name)
    assert backbone.num_features == width
    assert len(backbone.blocks) == depth
    assert backbone.patch_embed.patch_size == (16, 16)


def test_an_unknown_name_is_an_error():
    with pytest.raises(ArgumentError, match="timm has no model 'resnet19'"):
        timm_backbone("resnet19")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ExtraError, match=r"pip install 'l2l_niw\[vision\]'"):
        timm_backbone("resnet18")


@pytest.mark.parametrize("head", ["cnp", "ridge"])
def test_the_pose_encoder_takes_an_episode(head):
    head = CNP(64, targets=2, aggregate="max") if head == "cnp" else Ridge("regression", lam=1.0)
    model = EpisodicModel(PoseEncoder(), head)
    x, y, x_query, y_query = images(3, 1, 128), torch.randn(3, 2), images(2, 1, 128), torch.randn(2, 2)
    prediction = three_steps(model, x, y, x_query, y_query)
    assert prediction.mean.shape == (2, 2)
    assert model.backbone.out.in_features == 4096


def test_a_size_that_the_pose_encoder_cannot_halve_is_an_error():
    with pytest.raises(ArgumentError, match="size must be a multiple of 16"):
        PoseEncoder(size=100)


def test_an_mlp_is_its_layers():
    model = MLP(3, (4, 5), nn.Tanh, activate_last=True)
    x = torch.randn(2, 3)
    assert torch.equal(model(x), torch.tanh(model.layers[2](torch.tanh(model.layers[0](x)))))
    assert len(MLP(3, (4, 5)).layers) == 3


def test_a_head_must_be_a_head_and_a_backbone_a_backbone():
    with pytest.raises(ModelError, match="head must be one of"):
        EpisodicModel(nn.Identity(), nn.Linear(3, 2))
    with pytest.raises(ModelError, match=r"backbone must be a torch.nn.Module"):
        EpisodicModel(lambda x: x, NearestCentroid())
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    for backbone, given in ((nn.LSTM(3, 2), "tuple"), (nn.Flatten(0), r"\(12,\)")):
        with pytest.raises(ModelError, match=f"4 inputs to a tensor of shape .*, not {given}"):
            EpisodicModel(backbone, NearestCentroid())(x, y, x)


class TestCheckpoints:
    @pytest.fixture
    def saved(self):
        return MLP(3, (4, 2))

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
    def test_weights_come_back(self, saved, suffix, tmp_path):
        path = tmp_path / f"weights{suffix}"
        if suffix == ".pth":
            torch.save(saved.state_dict(), path)
        else:
            safetensors.torch.save_file(saved.state_dict(), path)
        loaded = load_checkpoint(MLP(3, (4, 2)), path)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), saved.parameters()))

    def test_a_key_a_prefix_and_what_is_dropped(self, saved, tmp_path):
        state = {f"module.{k}": v for k, v in saved.state_dict().items()}
        others = {"module.head.weight": torch.ones(2), "loss": torch.ones(1)}
        torch.save({"epoch": 3, "teacher": {**state, **others}}, tmp_path / "a")
        loaded = load_checkpoint(MLP(3, (4, 2)), tmp_path / "a", key="teacher", prefix="module.", drop="head.")
        assert torch.equal(loaded.layers[0].weight, saved.layers[0].weight)

    def test_a_mismatch_lists_the_keys_and_loads_nothing(self, saved, tmp_path):
        state = saved.state_dict()
        state["9.weight"] = state.pop("layers.2.bias")
        state["layers.0.bias"] = torch.ones(7)
        torch.save(state, tmp_path / "a.pth")
        model = MLP(3, (4, 2))
        before = model.layers[0].weight.clone()
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(model, tmp_path / "a.pth")
        assert "'layers.2.bias' is missing; '9.weight' is unknown" in str(error.value)
        assert "'layers.0.bias' has shape (7,) instead of (4,)" in str(error.value)
        assert torch.equal(model.layers[0].weight, before)

    def test_files_that_are_no_checkpoints(self, saved, tmp_path):
        with pytest.raises(ArgumentError, match="there is no file"):
            load_checkpoint(saved, tmp_path / "none.pth")
        for name, content in (("bad.pth", b"not weights"), ("text.pth", b"epoch"), ("bad.safetensors", b"not weights")):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(CheckpointError, match=name):
                load_checkpoint(saved, tmp_path / name)
        torch.save(saved, tmp_path / "module.pth")
        with pytest.raises(CheckpointError, match="tensors only"):
            load_checkpoint(saved, tmp_path / "module.pth")
        torch.save([1, 2], tmp_path / "list.pth")
        with pytest.raises(CheckpointError, match="holds a list"):
            load_checkpoint(saved, tmp_path / "list.pth")
        torch.save({"epoch": 3}, tmp_path / "empty.pth")
        with pytest.raises(CheckpointError, match="holds no tensor"):
            load_checkpoint(saved, tmp_path / "empty.pth")
        with pytest.raises(CheckpointError, match="no state dict under key 'model'"):
            load_checkpoint(saved, tmp_path / "empty.pth", key="model")


class TestBatchNorm:
    """Sampled weights are normalised by their own batch: running statistics were collected at other weights."""

    @pytest.fixture
    def model(self):
        backbone = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh())
        return EpisodicModel(backbone, Linear(6, 2))

    @pytest.fixture
    def data(self):
        return torch.randn(8, 3), torch.arange(8) % 2, 3 + 2 * torch.randn(10, 3), torch.arange(10) % 2

    def test_in_training_running_statistics_do_not_matter(self, model, data):
        x, y, x_query, _ = data
        learner = NIW(model, lr=0.1).clone()
        learner.adapt(learner(x, y).nll(y))
        post, before = learner.posterior(), []
        weights = post.sample()
        for shift in (0.0, 5.0):
            model.backbone[1].running_mean.fill_(shift)
            before.append(post.network(weights)(x, y, x_query).logits)
        assert torch.equal(*before)

    def test_prediction_writes_to_no_buffer(self, model, data):
        x, y, x_query, _ = data
        learner = NIW(model, lr=0.1).clone()
        learner.adapt(learner(x, y).nll(y))
        before = {name: b.clone() for name, b in model.named_buffers()}
        learner.posterior().predict(x, y, x_query, samples=3)
        learner.posterior(lambda network: network(x, y).nll(y), steps=2)
        assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())

    def test_in_evaluation_all_networks_share_the_running_statistics(self, model, data):
        x, y, x_query, _ = data
        norm = model.eval().backbone[1]
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        learner = NIW(model, lr=0.1).clone()
        learner.adapt(learner(x, y).nll(y))
        weights = learner.posterior().sample()
        network = learner.posterior().network(weights)
        hidden = x_query @ weights["backbone.0.weight"].T + weights["backbone.0.bias"]
        hidden = (hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
        hidden = torch.tanh(hidden * weights["backbone.1.weight"] + weights["backbone.1.bias"])
        logits = hidden @ weights["head.linear.weight"].T + weights["head.linear.bias"]
        assert torch.allclose(network(x, y, x_query).logits, logits.log_softmax(-1), atol=1e-6)

    def test_without_running_statistics_both_modes_agree(self, model, data):
        x, y, x_query, _ = data
        batch_statistics(model)
        training = model(x, y, x_query).logits
        assert torch.equal(model.eval()(x, y, x_query).logits, training)
        assert not list(model.backbone.buffers())

    def test_without_running_statistics_weights_can_be_vmapped(self, model, data):
        x, y, x_query, _ = data
        stacked = {name: torch.stack([p.detach(), 1.1 * p.detach()]) for name, p in model.named_parameters()}

        def run(weights):
            return functional_call(model, weights, (x, y, x_query)).logits

        with pytest.raises(RuntimeError, match="vmap"):
            vmap(run)(stacked)
        batch_statistics(model)
        together = vmap(run)(stacked)
        for i in range(2):
            assert torch.allclose(together[i], run({name: t[i] for name, t in stacked.items()}), atol=1e-6)

    @pytest.mark.parametrize("training", [True, False])
    def test_episodes_of_a_batch_do_not_see_each_other(self, model, training):
        model.train(training)
        x, x_query = torch.randn(4, 8, 3), torch.randn(4, 10, 3)
        x[1:] += 4.0
        y = (torch.arange(8) % 2).expand(4, 8)
        batch = model(x, y, x_query).logits
        for i in range(4):
            assert torch.allclose(batch[i], model(x[i], y[i], x_query[i]).logits, atol=1e-6)


@pytest.mark.slow
def test_the_core_imports_no_extra():
    """In a process of its own, since this one has imported them."""
    code = (
        "import sys, l2l_niw, l2l_niw.heads, l2l_niw.models; "
        "assert not {'timm', 'safetensors', 'torchmetrics', 'tqdm.auto'} & set(sys.modules), sorted(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
