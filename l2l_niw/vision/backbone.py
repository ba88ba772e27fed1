"""The network that all methods share, and its supervised pretraining on all training classes."""

import hashlib
from pathlib import Path
from typing import Dict, Union

import learn2learn as l2l
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from l2l_niw.data.images import load_images
from l2l_niw.errors import require
from l2l_niw.models import batch_statistics
from l2l_niw.utils._disk_cache import disk_cache
from l2l_niw.vision.config import Config

SHAPES = {
    "omniglot": (1, 28),
    "cifarfs": (3, 32),
    "fc100": (3, 32),
    "mini-imagenet": (3, 84),
    "tiered-imagenet": (3, 84),
}  # channels, and pixels per side
BATCH, LR = 64, 0.005  # of the pretraining


class ChannelsLast(nn.Module):
    """
    **Description**

    The same images in channels-last memory format, in which convolutions on a CPU are about twice as fast; their second
    derivatives, which MAML alone takes, are a quarter slower.
    """

    def forward(self, x: Tensor) -> Tensor:
        """A copy of the images, (n, channels, height, width), in channels-last memory format."""
        return x.clone(memory_format=torch.channels_last)  # with one channel `contiguous` would change nothing


class Backbone(nn.Sequential):
    """learn2learn's Conv-4, with `features` outputs per image. BatchNorm uses batch statistics, as in MAML."""

    def __init__(self, config: Config):
        channels, side = SHAPES[config.dataset]
        base = batch_statistics(l2l.vision.models.ConvBase(hidden=config.filters, channels=channels, max_pool=True))
        super().__init__(ChannelsLast(), base, nn.Flatten())
        self.features = config.filters * (side // 16) ** 2


def pretrain(config: Config, root: Union[str, Path, None], download: bool = False) -> Backbone:
    """A backbone after `config.pretraining` epochs of supervised training, with a linear head on all classes."""
    pixels, labels = load_images(config.dataset, "train", root, download)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        body = Backbone(config)
        net = nn.Sequential(body, nn.Linear(body.features, int(labels.max()) + 1))
        batches = max(len(labels) // BATCH, 1)
        opt = optim.Adam(net.parameters(), LR)
        schedule = optim.lr_scheduler.OneCycleLR(opt, LR, total_steps=config.pretraining * batches)
        title = f"pretraining, seed {config.seed}"
        with require("tqdm", "examples").tqdm(total=config.pretraining * batches, desc=title) as bar:
            for _ in range(config.pretraining):
                right = 0.0
                for done, chosen in enumerate(torch.randperm(len(labels)).tensor_split(batches), start=1):
                    logits = net(pixels[chosen].float() / 255.0)
                    opt.zero_grad()
                    loss = F.cross_entropy(logits, labels[chosen])
                    loss.backward()
                    opt.step()
                    schedule.step()
                    right += (logits.argmax(-1) == labels[chosen]).double().mean().item()
                    shown = {"loss": f"{loss.item():.3f}", "accuracy": f"{100 * right / done:.1f}%"}
                    bar.set_postfix(shown, refresh=False)
                    bar.update()
    return body


def start_of(config: Config, root: Union[str, Path, None] = None, download: bool = False) -> Dict[str, Tensor]:
    """
    **Description**

    The weights of `pretrain`, cached on disk: runs that differ in other settings start from the same weights, which are
    computed once. Other images have other entries in the cache.

    **Arguments**

    * **config** (Config) - Its dataset, filters, pretraining and seed.
    * **root** (str, *optional*, default=None) - Folder of the data; the variable L2L_NIW_DATA by default.
    * **download** (bool, *optional*, default=False) - Whether learn2learn may download what is not there.
    """
    digest = hashlib.sha256(repr((BATCH, LR)).encode())
    for part in load_images(config.dataset, "train", root, download):
        digest.update(part.numpy().data)
    settings = f"{config.dataset}-conv4-{config.filters}-{config.pretraining}-{config.seed}"
    return disk_cache(f"{settings}-{digest.hexdigest()[:16]}", lambda: pretrain(config, root, download).state_dict())
