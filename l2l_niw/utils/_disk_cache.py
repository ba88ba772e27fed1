"""Tensors that take long to compute, as files in torch's cache."""

import os
from pathlib import Path
from typing import Callable, Dict

import torch
from torch import Tensor

from l2l_niw.errors import NIWError, WriteError, require


def cache_path(name: str) -> Path:
    """The file of this name in torch's cache."""
    return Path(torch.hub.get_dir()) / "l2l_niw" / f"{name}.safetensors"


def disk_cache(name: str, make: Callable[[], Dict[str, Tensor]]) -> Dict[str, Tensor]:
    """
    **Description**

    What `make` returns, computed once: it is a file of this name in torch's cache (the variable TORCH_HOME) from then
    on.

    **Arguments**

    * **name** (str) - Of the file, without its suffix. It has to say all that the tensors depend on.
    * **make** (callable) - Computes them.

    **Example**

    ~~~python
    weights = disk_cache("cifarfs-conv4-32", lambda: pretrain(config).state_dict())
    ~~~
    """
    safetensors = require("safetensors.torch", "vision")
    path = cache_path(name)
    broken = require("safetensors", "vision").SafetensorError
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(f"{path.parent} cannot be made: {error}. Set TORCH_HOME to another folder.") from error
        tensors = make()
        new = path.with_suffix(f".{os.getpid()}")  # two processes may compute the same at a time
        try:
            safetensors.save_file(tensors, new)
            new.replace(path)  # at once, so that a stop leaves no part of a file
        except (OSError, broken) as error:
            new.unlink(missing_ok=True)
            raise WriteError(
                f"{path} cannot be written: {error}. Free space there, or set TORCH_HOME to another folder."
            ) from error
    try:
        return safetensors.load_file(path)
    except broken as error:
        raise NIWError(f"{path} cannot be read: {error}. Delete it, and it is computed again.") from error
