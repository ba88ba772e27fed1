"""Weights from local files: safetensors, or torch files read with `weights_only`."""

import os
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Union

import torch
from torch import Tensor, nn

from l2l_niw.errors import ArgumentError, CheckpointError, require
from l2l_niw.utils._functional import key_differences


def load_checkpoint(
    model: nn.Module,
    path: Union[str, os.PathLike],
    key: Optional[str] = None,
    prefix: str = "",
    drop: Union[str, Sequence[str]] = (),
) -> nn.Module:
    """
    **Description**

    Loads weights into a model, in place, and returns it. Nothing is loaded unless every name and shape
    agrees; a mismatch raises and lists the keys.

    **Arguments**

    * **model** (Module) - The model.
    * **path** (str) - A `.safetensors` file, or a file of `torch.save`, of which tensors only are read.
    * **key** (str, *optional*, default=None) - The entry that holds the state dict, such as 'state_dict' or
        'teacher', if the file holds more than that.
    * **prefix** (str, *optional*, default='') - Taken off the names; entries without it are left out.
    * **drop** (str or tuple, *optional*, default=()) - Prefixes of names to leave out, such as ('head.', 'fc.').

    **Example**

    ~~~python
    backbone = load_checkpoint(timm_backbone('dino-small'), 'dino_deitsmall16_pretrain.pth')
    ~~~
    """
    state = read_state(Path(path))
    if key is not None:
        if not isinstance(state.get(key), Mapping):
            raise CheckpointError(f"{path} has no state dict under key '{key}'; it holds {list(state)[:10]}.")
        state = state[key]
    given = {k[len(prefix) :]: v for k, v in state.items() if isinstance(v, Tensor) and k.startswith(prefix)}
    given = {k: v for k, v in given.items() if not k.startswith((drop,) if isinstance(drop, str) else tuple(drop))}
    if not given:
        raise CheckpointError(
            f"{path} holds no tensor under prefix '{prefix}'; its entries are {list(state)[:10]}. "
            "Give the key of the state dict, or its prefix."
        )
    differences = key_differences(model.state_dict(), given)
    if differences:
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}: {'; '.join(differences)}. Give prefix= or drop= if the "
            "names differ by that, or build the model that was saved."
        )
    model.load_state_dict(given)
    return model


def read_state(path: Path) -> Mapping[str, Any]:
    """A file's entries, on the CPU."""
    if not path.is_file():
        raise ArgumentError(f"path: there is no file {path}.")
    if path.suffix == ".safetensors":
        load_file = require("safetensors.torch", "vision").load_file
        try:
            return load_file(path)
        except Exception as error:  # a broken file can fail in any way
            raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file can fail in any way
        raise CheckpointError(
            f"{path} cannot be read as tensors only: it is broken, or it holds other objects, which may run code when "
            "they are read. Save the state dict anew with torch.save(model.state_dict(), path)."
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__} and not a state dict.")
    return state
