"""Whether two forwards got the same inputs, whatever they are made of."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

PLAIN = (np.generic, str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)


class Inputs:
    """
    **Description**

    A forward's arguments as they were: tensors and arrays are copied, so that what is written to them later, by
    whatever way, is seen. Tensors on a device are not copied: they are the same if they are the same object and were
    not written to, and no device is waited for.
    """

    def __init__(self, args: tuple, kwargs: dict):
        self._snapshot = snapshot((args, kwargs))

    def same_as(self, args: tuple, kwargs: dict) -> Optional[bool]:
        """Whether these arguments equal the forward's; None if they hold what cannot be compared, or nothing."""
        if not args and not kwargs:
            return None
        return same(self._snapshot, (args, kwargs))


def parts_of(value: Any) -> Optional[dict]:
    """What a container holds, by name; None for what is no container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, (Tensor, np.ndarray, *PLAIN)):
        return None
    return getattr(value, "__dict__", None) or None


def plain(tensor: Tensor) -> Any:
    """A tensor as strided ones: its values and, if it is sparse, where they stand."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values(), tuple(tensor.shape)]
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def written(tensor: Tensor) -> Optional[int]:
    """How often a tensor has been written to, if it counts that."""
    return None if tensor.is_inference() else tensor._version


DEEPEST = 32  # of nested containers; what goes deeper, as what refers to itself, cannot be compared


def snapshot(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        value = plain(value.detach())
        if isinstance(value, list):
            return (Tensor, snapshot(value, depth))
        if value.device.type == "cpu":
            return value.clone()
        return (value, written(value))
    if isinstance(value, np.ndarray):
        return value.copy()
    parts = parts_of(value)
    if parts is None or depth > DEEPEST:
        return value
    return type(value), {name: snapshot(part, depth + 1) for name, part in parts.items()}


def same(before: Any, value: Any, depth: int = 0) -> Optional[bool]:
    """Whether a value equals what a snapshot was taken of; None if that cannot be told."""
    if isinstance(value, Tensor):
        value = plain(value.detach())
        if isinstance(value, list):
            return isinstance(before, tuple) and before[0] is Tensor and same(before[1], value, depth)
        if isinstance(before, Tensor):
            alike = value.device.type == "cpu" and (value.shape, value.dtype) == (before.shape, before.dtype)
            return alike and torch.equal(before, value)
        unwritten = isinstance(before, tuple) and before[1] == written(value)
        return unwritten and before[0].data_ptr() == value.data_ptr() and before[0].shape == value.shape
    if isinstance(value, np.ndarray):
        alike = isinstance(before, np.ndarray) and (value.shape, value.dtype) == (before.shape, before.dtype)
        return alike and (None if value.dtype.hasobject else bool(np.array_equal(before, value)))
    parts = parts_of(value)
    if depth > DEEPEST:
        return None
    if parts is None:
        return type(before) is type(value) and bool(before == value) if isinstance(value, PLAIN) else None
    if not isinstance(before, tuple) or before[0] is not type(value) or before[1].keys() != parts.keys():
        return False
    found = [same(before[1][name], part, depth + 1) for name, part in parts.items()]
    return False if False in found else None if None in found else True
