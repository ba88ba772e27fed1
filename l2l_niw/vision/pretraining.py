"""Supervised pretraining of the backbone on all training classes: weights that all methods start from."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Union

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from l2l_niw.data.images import Images, load_images
from l2l_niw.data.tasksets import ImageTaskset
from l2l_niw.errors import require
from l2l_niw.heads.episodic import EpisodicModel
from l2l_niw.heads.nearest_centroid import NearestCentroid
from l2l_niw.models.adapters import own_name
from l2l_niw.models.checkpoints import read_state
from l2l_niw.utils._disk_cache import cache_path, disk_cache
from l2l_niw.utils._files import make_folder, replacing
from l2l_niw.vision.backbone import Backbone, Conv4
from l2l_niw.vision.config import Config
from l2l_niw.vision.transformers import pretrained_state

BATCH, LR, MOMENTUM, WEIGHT_DECAY = 128, 0.1, 0.9, 5e-4
WARM_UP = 0.2  # the part of all steps in which the learning rate rises
PADDING, JITTER = 4, 0.2  # pixels that a crop may be shifted by, and the relative change of colours
RECIPE = (BATCH, LR, MOMENTUM, WEIGHT_DECAY, WARM_UP, PADDING, JITTER)
ROUNDS, TASKS = 12, 100  # validation rounds, and their tasks
CURVE = "curve"  # the learning curve's key beside the weights
COLUMNS = ("epoch", "loss", "accuracy", "validation_1_shot", "validation_5_shot")


def crops_and_flips(pixels: Tensor) -> Tensor:
    """Images of bytes shifted by up to `PADDING` pixels, with black edges, and mirrored at random."""
    n, channels, height, width = pixels.shape
    rows = torch.randint(2 * PADDING + 1, (n, 1)) + torch.arange(height)
    columns = torch.randint(2 * PADDING + 1, (n, 1)) + torch.arange(width)
    columns = torch.where(torch.rand(n, 1) < 0.5, columns.flip(1), columns)
    which = torch.arange(n)[:, None, None, None], torch.arange(channels)[None, :, None, None]
    return F.pad(pixels, (PADDING,) * 4)[(*which, rows[:, None, :, None], columns[:, None, None, :])]


def colour_jitter(images: Tensor) -> Tensor:
    """Images between 0 and 1 whose brightness, contrast and saturation change by up to `JITTER`, in that order."""

    def factor() -> Tensor:
        return torch.empty(len(images), 1, 1, 1).uniform_(1 - JITTER, 1 + JITTER)

    images = images * factor()
    for dims in ((1, 2, 3), (1,)):
        mean = images.mean(dims, keepdim=True)
        images = (images - mean) * factor() + mean
    return images.clamp(0, 1)


def augmented(pixels: Tensor) -> Tensor:
    """Training images between 0 and 1. Those without colour are left alone: a character mirrored is another one."""
    return pixels.float() / 255.0 if pixels.shape[1] == 1 else colour_jitter(crops_and_flips(pixels).float() / 255.0)


class Pretraining:
    """
    **Description**

    A backbone and a linear head on all training classes, trained by SGD with momentum on augmented images, in bfloat16
    where the processor has it: with all that a checkpoint holds.

    **Arguments**

    * **config** (Config) - Its dataset, filters and pretraining.
    * **images** (Images) - Of the training classes.
    """

    def __init__(self, config: Config, images: Images):
        config = replace(config, precision="bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32")
        self.images, self.epochs = images, config.pretraining
        self.body = Conv4(config, pretraining=True)
        head = nn.Linear(self.body.features, int(images.labels.max()) + 1)
        self.net = nn.Sequential(self.body, head)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.batches = max(len(images.labels) // BATCH, 1)
        self.opt = optim.SGD(self.net.parameters(), LR, MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY)
        steps = self.epochs * self.batches
        self.schedule = optim.lr_scheduler.OneCycleLR(
            self.opt, LR, total_steps=steps, pct_start=WARM_UP, cycle_momentum=False
        )
        self.curve: List[List[float]] = []  # of `COLUMNS`

    def epoch(self, bar: Any) -> None:
        """All images once."""
        pixels, labels = self.images
        losses, right = [], []
        self.net.train()
        for chosen in torch.randperm(len(labels)).tensor_split(self.batches):
            logits = self.net(augmented(pixels[chosen]))
            loss = F.cross_entropy(logits, labels[chosen])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.schedule.step()
            losses.append(loss.item())
            right.append((logits.argmax(-1) == labels[chosen]).double().mean().item())
            bar.update()
        accuracy = sum(right) / len(right)
        bar.set_postfix({"loss": f"{losses[-1]:.3f}", "accuracy": f"{100 * accuracy:.1f}%"}, refresh=False)
        self.curve.append([len(self.curve) + 1, sum(losses) / len(losses), accuracy])

    def validate(self, images: Images) -> List[float]:
        """Accuracy of nearest centroids on new classes, 5-way, with one and with five shots; nan where they are few."""
        model, found = EpisodicModel(self.body, NearestCentroid("cosine")).eval(), []
        counts = torch.bincount(images.labels)
        for shots in (1, 5):
            if len(counts) < 5 or counts.min() < shots + 15:
                found.append(float("nan"))
                continue
            tasks, right = ImageTaskset(images, 5, shots, 15, TASKS), 0.0
            with torch.no_grad():
                for task in (tasks[i] for i in range(TASKS)):
                    chosen = model(task.x, task.y, task.x_query).probs.argmax(-1)
                    right += (chosen == task.y_query).double().mean().item() / TASKS
            found.append(right)
        return found

    def state(self) -> Dict[str, Any]:
        """What a checkpoint holds."""
        own = {name: getattr(self, name).state_dict() for name in ("net", "opt", "schedule")}
        return {**own, "random": torch.get_rng_state(), CURVE: self.curve}

    def restore(self, path: Path) -> None:
        """Takes everything from a checkpoint."""
        state = read_state(path, ("net", "opt", "schedule", "random", CURVE), "Delete it to pretrain anew.")
        for name in ("net", "opt", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        self.curve = state[CURVE]


def pretrain(
    config: Config, seed: int, root: Union[str, Path, None], download: bool, checkpoint: Path
) -> Dict[str, Tensor]:
    """
    **Description**

    The backbone's weights and BatchNorm statistics after `config.pretraining` epochs, and the learning curve under the
    key 'curve', (epochs, 5), of `COLUMNS`; accuracies of new classes are nan where none were measured. Pretraining that
    was stopped resumes after its last epoch.
    """
    validation = load_images(config.dataset, "validation", root, download)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        training = Pretraining(config, load_images(config.dataset, "train", root, download))
        if checkpoint.exists():
            training.restore(checkpoint)
        done, each = len(training.curve), training.batches
        title = f"pretraining, seed {seed}"
        bar = require("tqdm", "examples").tqdm(total=training.epochs * each, initial=done * each, desc=title)
        with bar:
            while len(training.curve) < training.epochs:
                training.epoch(bar)
                done = len(training.curve)
                rounds, before = (number * ROUNDS // training.epochs for number in (done, done - 1))
                training.curve[-1] += training.validate(validation) if rounds > before else [float("nan")] * 2
                make_folder(checkpoint.parent)
                with replacing(checkpoint) as file:
                    torch.save(training.state(), file)
    weights = {name: t.contiguous() for name, t in training.body.state_dict().items()}
    return {**weights, CURVE: torch.tensor(training.curve)}


def name_of(config: Config, seed: int, root: Union[str, Path, None] = None, download: bool = False) -> str:
    """What the pretrained weights are called in the cache: it says all that they depend on."""
    digest = hashlib.sha256(repr(RECIPE).encode())
    for part in load_images(config.dataset, "train", root, download):
        digest.update(part.numpy().data)
    return f"{config.dataset}-conv4-{config.filters}-{config.pretraining}-{seed}-{digest.hexdigest()[:16]}"


def pretrained(
    config: Config, seed: int, root: Union[str, Path, None] = None, download: bool = False
) -> Dict[str, Tensor]:
    """
    **Description**

    What `pretrain` returns, cached on disk: runs that differ in other settings start from the same weights, which are
    computed once. Other images have other entries in the cache.

    **Arguments**

    * **config** (Config) - Its dataset, filters and pretraining.
    * **seed** (int) - Of initial weights, order and augmentation.
    * **root** (str, *optional*, default=None) - Folder of the data; the variable L2L_NIW_DATA by default.
    * **download** (bool, *optional*, default=False) - Whether learn2learn may download what is not there.
    """
    name = name_of(config, seed, root, download)
    checkpoint = cache_path(name).with_suffix(".pt")
    found = disk_cache(name, lambda: pretrain(config, seed, root, download, checkpoint))
    checkpoint.unlink(missing_ok=True)
    return found


def load_start(
    backbone: Backbone,
    config: Config,
    root: Union[str, Path, None] = None,
    download: bool = False,
    component: int = 0,
) -> None:
    """
    **Description**

    Gives a backbone the pretrained weights that a run starts from, and the running statistics that it has room for.
    There is one pretraining of a transformer: components differ by the tasks that they are trained on.

    **Arguments**

    * **backbone** (Backbone) - Of the run, or of one of its components.
    * **config** (Config) - The run's.
    * **root**, **download** - As in `pretrained`.
    * **component** (int, *optional*, default=0) - Which.
    """
    if config.backbone == "conv4":
        found = pretrained(config, config.pretraining_seed(component), root, download)
    else:
        found = pretrained_state(config, root)
    names = [name for name in backbone.state_dict() if "lora_" not in name]
    backbone.load_state_dict({name: found[own_name(name)] for name in names}, strict=False)
