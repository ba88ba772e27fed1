"""ResNet-18 and vision transformers, by timm."""

from typing import Any

from torch import nn

from l2l_niw.errors import ArgumentError, require

NAMES = {
    "resnet18": "resnet18",
    "dino-small": "vit_small_patch16_224.dino",
    "dino-base": "vit_base_patch16_224.dino",
}


def timm_backbone(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
    """
    **Description**

    A backbone of timm without its classifier. `num_features` is the width of its features. Attention is
    computed in plain products rather than fused: fused kernels have no second derivative, which MAML
    takes. Nothing is downloaded unless `pretrained`; `load_checkpoint` reads local weights, which fit a ViT of
    the image size that they were saved with.

    **Arguments**

    * **name** (str) - 'resnet18', 'dino-small', 'dino-base' (ViT-S/16 and ViT-B/16 as DINO trained them), or any of
        timm's own names.
    * **pretrained** (bool, *optional*, default=False) - Whether timm downloads its weights.
    * **options** - timm's, such as `img_size=32, patch_size=4` for a ViT, or `in_chans=1`.

    **References**

    1. Caron et al. 2021. "Emerging Properties in Self-Supervised Vision Transformers."

    **Example**

    ~~~python
    backbone = load_checkpoint(timm_backbone('dino-small'), 'dino_deitsmall16_pretrain.pth')
    model = EpisodicModel(backbone, NearestCentroid())
    ~~~
    """
    timm = require("timm", "vision")
    full = NAMES.get(name, name)
    if not timm.is_model(full.split(".")[0]):
        raise ArgumentError(f"name: timm has no model '{name}'. Beside its own names there are {tuple(NAMES)}.")
    backbone = timm.create_model(full, pretrained=pretrained, num_classes=0, **options)
    for module in backbone.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return backbone
