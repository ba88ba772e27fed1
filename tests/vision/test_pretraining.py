"""Supervised pretraining: what it is trained on, that it can be stopped, and what runs take of it."""

import math
from dataclasses import replace

import pytest
import torch
from drawings import SMALL, draw_cifarfs
from torch import nn

from l2l_niw.data.images import load_images
from l2l_niw.vision import build, pretraining, runs
from l2l_niw.vision.backbone import Conv4
from l2l_niw.vision.methods import complete
from l2l_niw.vision.pretraining import CURVE, PADDING, Pretraining, augmented, colour_jitter, crops_and_flips
from l2l_niw.vision.pretraining import load_start, pretrained

import learn2learn as l2l

CONFIG = replace(SMALL, pretraining=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_cifarfs(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of torch's."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hub" / "l2l_niw"


def test_a_crop_is_the_image_shifted_and_perhaps_mirrored_with_black_edges():
    torch.manual_seed(0)
    pixels = torch.randint(1, 256, (40, 3, 9, 7), dtype=torch.uint8)
    padded = torch.zeros(40, 3, 9 + 2 * PADDING, 7 + 2 * PADDING, dtype=torch.uint8)
    padded[..., PADDING : PADDING + 9, PADDING : PADDING + 7] = pixels
    found, places = crops_and_flips(pixels), []
    for image, own in zip(padded, found):
        shifts = [(i, j) for i in range(2 * PADDING + 1) for j in range(2 * PADDING + 1)]
        crops = {(i, j, flip): c.flip(-1) if flip else c for i, j in shifts for flip in (False, True)
                 for c in [image[:, i : i + 9, j : j + 7]]}  # fmt: skip
        places.append([place for place, crop in crops.items() if torch.equal(crop, own)])
    assert all(len(found) == 1 for found in places)
    assert 10 <= sum(flip for ((_, _, flip),) in places) <= 30
    assert len({place for (place,) in places}) > 20


def test_colour_jitter_scales_an_image_s_brightness_contrast_and_saturation():
    grey = torch.full((50, 3, 4, 4), 0.5)
    brightness = colour_jitter(grey)
    assert brightness.std((1, 2, 3)).max() < 1e-6  # nothing else changes of an even grey
    assert 0.5 * (1 - pretraining.JITTER) <= brightness.min() < 0.45
    assert 0.55 < brightness.max() <= 0.5 * (1 + pretraining.JITTER)
    coloured = torch.rand(50, 3, 4, 4) * 0.2 + 0.4
    found = colour_jitter(coloured)
    means = found.mean((1, 2, 3)) / coloured.mean((1, 2, 3))
    contrast = (found.mean(1) - found.mean((1, 2, 3))[:, None, None]) / (
        coloured.mean(1) - coloured.mean((1, 2, 3))[:, None, None]
    )
    assert contrast.flatten(1).std(1).max() < 1e-3  # one factor an image
    ratio = contrast.flatten(1).mean(1) / means
    assert (ratio - 1).abs().max() <= pretraining.JITTER + 1e-4
    assert ratio.std() > 0.05


def test_images_without_colour_are_left_alone():
    characters = torch.randint(0, 256, (4, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(augmented(characters), characters.float() / 255.0)


def test_it_learns_to_tell_the_training_classes_apart_and_new_ones(data):
    """Colours of classes differ, so that a nearest centroid on its features beats one on those of a random network."""
    config = complete(replace(SMALL, method="protonet", pretraining=15))
    tasks = runs.tasksets_of(config, data).train
    accuracies = []
    for load in (False, True):
        method = build(config)
        if load:
            load_start(method.backbones[0], config, data)
        found, y = runs.predictions(method, tasks, 100)
        accuracies.append((found.argmax(-1) == y).double().mean())
    assert accuracies[1] > accuracies[0] + 0.1
    curve = pretrained(config, 0, data)[CURVE]
    assert curve.shape == (15, 5)
    assert curve[-1, 1] < curve[0, 1] - 0.2
    assert curve[:, 3:].isnan().all()  # six images of a class are too few for a validation round


def test_validation_rounds_are_nearest_centroids_on_the_validation_classes(tmp_path):
    root = draw_cifarfs(tmp_path / "data", each=20)
    curve = pretrained(replace(SMALL, pretraining=15), 0, root)[CURVE]
    assert curve[:, 3].isfinite().sum() == pretraining.ROUNDS
    assert curve[-1, 3:].isfinite().all()
    assert (curve[-1, 3:] > 0.25).all()  # chance is a fifth


def test_a_stopped_one_ends_as_one_that_is_not(data, tmp_path, monkeypatch):
    expected, epoch = pretrained(CONFIG, 1, data), Pretraining.epoch
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "other"))

    def stopped(self, bar):
        if len(self.curve) == 2:
            raise KeyboardInterrupt
        epoch(self, bar)

    monkeypatch.setattr(Pretraining, "epoch", stopped)
    with pytest.raises(KeyboardInterrupt):
        pretrained(CONFIG, 1, data)
    assert len(list((tmp_path / "other").rglob("*.pt"))) == 1
    trained = []
    monkeypatch.setattr(Pretraining, "epoch", lambda self, bar: trained.append(0) or epoch(self, bar))
    torch.manual_seed(99)
    found = pretrained(CONFIG, 1, data)
    assert len(trained) == 1
    assert all(torch.equal(found[key], expected[key]) for key in expected if key != CURVE)
    assert torch.equal(found[CURVE][:, :3], expected[CURVE][:, :3])
    assert not list((tmp_path / "other").rglob("*.pt"))


def test_other_images_seeds_epochs_and_filters_have_other_weights(data, tmp_path, cache):
    pretrained(CONFIG, 0, data)
    others = draw_cifarfs(tmp_path / "others", classes=4)
    fewer, wider = replace(CONFIG, pretraining=2), replace(CONFIG, filters=5)
    for config, seed, root in ((CONFIG, 0, others), (CONFIG, 1, data), (fewer, 0, data), (wider, 0, data)):
        before = len(list(cache.glob("cifarfs-*.safetensors")))
        pretrained(config, seed, root)
        assert len(list(cache.glob("cifarfs-*.safetensors"))) == before + 1


def test_seeds_and_components_take_pretrainings_in_turn(data, monkeypatch):
    taken = []
    real = pretraining.pretrained
    monkeypatch.setattr(pretraining, "pretrained", lambda c, seed, *a: taken.append(seed) or real(c, seed % 2, *a))
    for seed, component, backbones in ((2, 0, None), (2, 1, None), (5, 0, 4), (3, 1, 4)):
        config = replace(CONFIG, seed=seed, backbones=backbones)
        load_start(Conv4(config), config, data, component=component)
    assert taken == [2, 3, 1, 0]


def test_every_component_starts_from_its_own_pretraining(data, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(runs.Training, "step", lambda self, tasks: begun.append(self.method) or 1 / 0)
    config = replace(CONFIG, method="niw-qda-2", backbones=2, seed=1, batchnorm="running")
    with pytest.raises(ZeroDivisionError):
        runs.train(config, tmp_path / "run", data)
    for own, seed in zip(begun[0].backbones, (1, 0), strict=True):
        start = pretrained(config, seed, data)
        assert all(torch.equal(value, start[name]) for name, value in own.state_dict().items())


@pytest.mark.parametrize("batchnorm", ["batch", "running"])
def test_batchnorm_has_the_statistics_that_the_config_says(batchnorm, data):
    config = replace(CONFIG, batchnorm=batchnorm)
    body = Conv4(config).train()
    load_start(body, config, data)
    x = torch.rand(6, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(body(x)[:3], body(x[:3]), atol=1e-5) == (batchnorm == "running")
    statistics = [part.running_mean for part in body.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    assert all((own is None) == (batchnorm == "batch") for own in statistics)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_is_learn2learn_s_network_in_either_precision(precision):
    torch.manual_seed(0)
    body = Conv4(replace(SMALL, precision=precision))
    theirs = l2l.vision.models.ConvBase(hidden=SMALL.filters, channels=3, max_pool=True)
    theirs.load_state_dict(body[1].state_dict(), strict=False)
    x = torch.rand(5, 3, 32, 32)
    found, expected = body(x), theirs(x).flatten(1)
    assert found.dtype == torch.float32
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 1e-6 if precision == "float32" else 1e-5 < error < 0.05
    found.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in body.parameters())
    assert body.features == found.shape[1]


def test_its_learning_rate_rises_and_ends_near_zero(data):
    training = Pretraining(CONFIG, load_images("cifarfs", "train", data, False))
    rates = []
    step = training.schedule.step
    training.schedule.step = lambda: rates.append(training.opt.param_groups[0]["lr"]) or step()

    class Bar:
        def update(self):
            pass

        def set_postfix(self, *args, **kwargs):
            pass

    for _ in range(CONFIG.pretraining):
        training.epoch(Bar())
    assert max(rates) <= pretraining.LR
    assert len(rates) == CONFIG.pretraining * training.batches
    assert rates[-1] < rates[0]
    assert all(math.isfinite(rate) for rate in rates)
