"""What a learner remembers of its forwards: to tell support from query, and to count data."""

from dataclasses import dataclass
from typing import Any, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError
from l2l_niw.predictions import Prediction
from l2l_niw.readout import Call

REMEMBERED = 4  # forwards, so that a long evaluation with gradients enabled holds no more than these


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from tensors_in(value)
    elif isinstance(nest, (tuple, list)):
        for value in nest:
            yield from tensors_in(value)


def batch_size(outputs: Any, inputs: Any) -> Optional[int]:
    """The number of data in a forward: a prediction's own, or the first dimension of what came out, or went in."""
    if isinstance(outputs, Prediction):
        return outputs.n
    if isinstance(outputs, Tensor) and outputs.dim():
        return outputs.shape[0]
    for tensor in tensors_in((outputs, inputs)):
        if tensor.dim() > 0:
            return tensor.shape[0]
    return None


def versions_of(tensors: List[Tensor]) -> List[int]:
    """How often each tensor has been written to."""
    return [0 if t.is_inference() else t._version for t in tensors]


class Inputs:
    """The tensors that a forward was called with, and the versions they had then."""

    def __init__(self, args: tuple, kwargs: dict):
        simple = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
        self.tensors = list(args) if simple else list(tensors_in((args, kwargs)))
        self.versions = versions_of(self.tensors)

    def same_as(self, other: "Inputs") -> bool:
        """Whether both calls got equal tensors. What `other` got must not have been written to since."""
        if len(self.tensors) != len(other.tensors) or other.versions != versions_of(other.tensors):
            return False
        return all(
            a is b or a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
            for a, b in zip(self.tensors, other.tensors)
        )


@dataclass
class Forward:
    """
    A forward whose loss may come to `adapt`. Its weights are views of its own: they tell whether it did. `readout` is
    the readout's call, if what that gave is what the forward did.
    """

    inputs: Inputs
    weights: List[Tensor]
    n: Optional[int]
    outputs: Any
    readout: Optional[Call] = None


def count_data(forwards: List[Forward]) -> int:
    """The number of data behind a loss that was computed from these forwards; 1 if from none."""
    if any(forward.n is None for forward in forwards):
        raise ArgumentError("adapt: no tensor of the forward has a batch dimension. Pass n, the number of data.")
    return sum(forward.n for forward in forwards) or 1


def sum_of_present(gradients: Tuple[Optional[Tensor], ...]) -> Optional[Tensor]:
    """A weight's gradient through all forwards that used it; None if none did."""
    present = [g for g in gradients if g is not None]
    return sum(present[1:], present[0]) if present else None
