"""Weights from local files: safetensors, or torch files read with `weights_only`."""

import os
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Union

import torch
from torch import Tensor, nn

from l2l_niw.errors import ArgumentError, CheckpointError, ExtraError, require
from l2l_niw.utils._functional import key_differences

SAVE_ANEW = "Save the state dict anew with torch.save(model.state_dict(), path)."


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
    state: Mapping = read_state(Path(path))
    if key is not None:
        if not isinstance(state.get(key), Mapping):
            raise CheckpointError(f"{path} has no state dict under key '{key}'; it holds {list(state)[:10]}.")
        state = state[key]
    named = {k: v for k, v in state.items() if isinstance(k, str) and isinstance(v, Tensor)}
    given = {k[len(prefix) :]: v for k, v in named.items() if k.startswith(prefix)}
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


def read_state(path: Path, keys: Sequence[str] = (), remedy: str = SAVE_ANEW) -> Dict[str, Any]:
    """
    **Description**

    A file's entries, on the CPU. Nothing but tensors, numbers, strings and containers of these is read.

    **Arguments**

    * **path** (Path) - A `.safetensors` file, or a file of `torch.save`.
    * **keys** (sequence, *optional*, default=()) - Entries that have to be there.
    * **remedy** (str, *optional*) - What to do about a file that is broken or holds something else.
    """
    if not path.is_file():
        raise ArgumentError(f"path: there is no file {path}.")
    try:
        if path.suffix == ".safetensors":
            state = require("safetensors.torch", "vision").load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except ExtraError:
        raise
    except Exception as error:  # a broken file can fail in any way
        raise CheckpointError(
            f"{path} cannot be read as tensors only: it is broken, or it holds other objects, which may run code when "
            f"they are read. {remedy}"
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__} and not a dict of tensors. {remedy}")
    missing = [key for key in keys if key not in state]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}. {remedy}")
    return dict(state)
