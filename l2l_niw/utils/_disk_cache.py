"""Tensors that take long to make, in torch's cache."""

import os
from pathlib import Path
from typing import Callable, Dict

import torch
from torch import Tensor

from l2l_niw.errors import NIWError, require


def kept(name: str, make: Callable[[], Dict[str, Tensor]]) -> Dict[str, Tensor]:
    """
    **Description**

    What `make` returns, made once: it is kept as a file of this name in torch's cache (the variable TORCH_HOME). The
    name has to say all that it depends on.

    **Example**

    ~~~python
    weights = kept("cifarfs-conv4-32", lambda: pretrain(config).state_dict())
    ~~~
    """
    safetensors = require("safetensors.torch", "vision")
    path = Path(torch.hub.get_dir()) / "l2l_niw" / f"{name}.safetensors"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NIWError(f"{path.parent} cannot be made: {error}. Set TORCH_HOME to another folder.") from error
        new = path.with_suffix(f".{os.getpid()}")
        safetensors.save_file(make(), new)
        new.replace(path)  # at once, so that a stop or another process leaves a whole file
    try:
        return safetensors.load_file(path)
    except require("safetensors", "vision").SafetensorError as error:
        raise NIWError(f"{path} cannot be read: {error}. Delete it, and it is made anew.") from error
