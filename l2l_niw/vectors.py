"""Passes over vectors of many weights: block by block, and in memory that is used again.

An operation on such a vector takes less time than the system takes to provide its result's memory, since C libraries
give blocks above 32 MB back as soon as they are free; and temporaries of a whole pass would each go through main
memory, where those of a block stay in the cache. Small vectors, and those with a graph or on a device, are left alone.
"""

import sys
import threading
from functools import wraps
from typing import Callable, List, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**16  # weights: a multiple of 16, so that random numbers are those of a whole vector
LARGE = BLOCK
Vectors = Union[Tensor, Tuple[Tensor, ...]]

_memory: List[np.ndarray] = []
_lock = threading.Lock()


def is_large(vector: Tensor) -> bool:
    """Whether a vector is worth going through in blocks."""
    return vector.dim() == 1 and vector.numel() > LARGE and vector.device.type == "cpu"


def unused() -> List[int]:
    """Which memory no tensor refers to: what the list and the call itself refer to, and nothing else."""
    return [i for i in range(len(_memory)) if sys.getrefcount(_memory[i]) == 2]


def release() -> None:
    """Gives memory back that no vector uses. A new `NIW` does so with what earlier ones have left."""
    with _lock:
        free = set(unused())
        _memory[:] = [memory for i, memory in enumerate(_memory) if i not in free]


def copy_of(vector: Tensor) -> Tensor:
    return empty_vector(len(vector), vector.dtype).copy_(vector) if is_large(vector) else vector.clone()


def empty_vector(d: int, dtype: torch.dtype) -> Tensor:
    """A vector of d weights, in memory that an earlier one has left, if there is any."""
    size = d * dtype.itemsize
    with _lock:
        found = next((_memory[i] for i in unused() if _memory[i].nbytes == size), None)
        if found is None:
            found = np.empty(size, np.uint8)
            _memory.append(found)
        return torch.from_numpy(found).view(dtype)


def concatenate(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One vector of all tensors' elements."""
    parts = [t if t.dim() == 1 else t.reshape(-1) for t in tensors]
    d = sum(map(len, parts))
    plain = d <= LARGE or torch.is_grad_enabled() or parts[0].device.type != "cpu"
    return torch.cat(parts).to(dtype) if plain else torch.cat(parts, out=empty_vector(d, dtype))


def blockwise(function: Callable[..., Vectors]) -> Callable[..., Vectors]:
    """
    **Description**

    Makes a function that works weight by weight go through large vectors in blocks. Its first argument is a vector;
    others of the same length are cut like it, and scalars and what is no tensor are handed on. It returns one
    vector or several. Where a tensor has another shape, as with several episodes, all is done at once.
    """

    @wraps(function)
    def run(*args) -> Vectors:
        cut = [isinstance(a, Tensor) and a.dim() > 0 for a in args]
        same = all(a.shape == args[0].shape for a, is_cut in zip(args, cut) if is_cut)
        if not is_large(args[0]) or not same or torch.is_grad_enabled():
            return function(*args)
        d, wholes = len(args[0]), []
        starts = [*range(0, d - BLOCK + 1, BLOCK)]
        for start, end in zip(starts, [*starts[1:], d]):  # the last has what remains too
            part = slice(start, end)
            found = function(*(a[part] if is_cut else a for a, is_cut in zip(args, cut)))
            results = found if isinstance(found, tuple) else (found,)
            wholes = wholes or [empty_vector(d, r.dtype) for r in results]
            for whole, result in zip(wholes, results):
                whole[part] = result
        return tuple(wholes) if isinstance(found, tuple) else wholes[0]

    return run
