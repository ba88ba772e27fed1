"""The network that all methods share, and where its weights may begin: telling all training classes apart."""

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
from l2l_niw.utils._disk_cache import kept
from l2l_niw.vision.config import Config

SHAPES = {
    "omniglot": (1, 28),
    "cifarfs": (3, 32),
    "fc100": (3, 32),
    "mini-imagenet": (3, 84),
    "tiered-imagenet": (3, 84),
}  # channels, and pixels a side
BATCH, LR = 64, 0.005  # of the pretraining


class ChannelsLast(nn.Module):
    """
    The same images in the order of memory that convolutions on a CPU are about twice as fast in; second derivatives
    of them, which are MAML's alone, are a quarter slower.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.channels_last)  # with one channel `contiguous` would change nothing


class Backbone(nn.Sequential):
    """learn2learn's Conv-4, to `features` numbers an image. BatchNorm takes the batch's statistics, as in MAML."""

    def __init__(self, config: Config):
        channels, side = SHAPES[config.dataset]
        base = batch_statistics(l2l.vision.models.ConvBase(hidden=config.filters, channels=channels, max_pool=True))
        super().__init__(ChannelsLast(), base, nn.Flatten())
        self.features = config.filters * (side // 16) ** 2


def pretrain(config: Config, root: Union[str, Path, None], download: bool = False) -> Backbone:
    """A backbone after `config.pretraining` epochs of telling all training classes apart, with a linear readout."""
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

    The weights that `pretrain` comes to, kept: runs which differ in something else begin with the same ones, and wait
    for them once. Other images have weights of their own.
    """
    digest = hashlib.sha256(repr((BATCH, LR)).encode())
    for part in load_images(config.dataset, "train", root, download):
        digest.update(part.numpy().data)
    settings = f"{config.dataset}-conv4-{config.filters}-{config.pretraining}-{config.seed}"
    return kept(f"{settings}-{digest.hexdigest()[:16]}", lambda: pretrain(config, root, download).state_dict())
