"""Lets learn2learn be imported where a CUDA-linked torchvision meets a CPU-only torch."""

import importlib
import sys

import torch

_MISSING = "operator torchvision::nms does not exist"
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# Definitions live as long as this object, so it must not be collected.
_library = None


def ensure_torchvision() -> bool:
    """
    **Description**

    Imports torchvision, and repairs that import where torchvision's compiled operators could not
    be loaded beside a CPU-only torch: its Python side then asks for the schema of `nms`, which
    nothing has defined. Defining the schema alone is enough for transforms, datasets and models;
    `torchvision.ops.nms` and `torchvision.io` stay unavailable, as they were.

    Where `import torchvision` works, or fails for any other reason, nothing is changed.

    **Return**

    * (bool) - True if the repair was needed.
    """
    global _library
    try:
        importlib.import_module("torchvision")
        return False
    except ImportError:
        return False  # learn2learn's own import will say so
    except RuntimeError as error:
        if _MISSING not in str(error):
            raise
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        _library.define(operator + _SIGNATURE)
    importlib.import_module("torchvision")
    return True
