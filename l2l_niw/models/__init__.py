"""Backbones beside learn2learn's own, which are used as they are, and what goes with them."""

from l2l_niw.models.adapters import add_adapters
from l2l_niw.models.blocks import text_blocks, vit_blocks
from l2l_niw.models.checkpoints import load_checkpoint
from l2l_niw.models.frozen import FrozenFeatures
from l2l_niw.models.mlp import MLP
from l2l_niw.models.normalisation import batch_statistics
from l2l_niw.models.pose import PoseEncoder
from l2l_niw.models.timm_backbone import timm_backbone

__all__ = [
    "MLP",
    "FrozenFeatures",
    "PoseEncoder",
    "add_adapters",
    "batch_statistics",
    "load_checkpoint",
    "text_blocks",
    "timm_backbone",
    "vit_blocks",
]
