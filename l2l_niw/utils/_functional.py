"""A model's random weights as a list of tensors, and the model as a function of them."""

from collections import OrderedDict
from functools import lru_cache
from operator import itemgetter
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor, nn

from l2l_niw.errors import ArgumentError, ModelError

BLOCK = 2**16  # weights: what is computed of so many stays in a core's cache
SMALL = 2**20  # weights: so few may be held once more


@lru_cache(maxsize=256)
def picker(indices: Tuple[int, ...]) -> Callable[[Sequence], Union[list, tuple]]:
    """Takes these entries of a sequence, in one call."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1) if indices else slice(0))


def in_blocks(
    function: Callable[..., Sequence[Sequence[Tensor]]],
    columns: Sequence,
    consumed: Optional[int] = None,
    written: Optional[Tuple[int, int]] = None,
) -> Sequence:
    """
    **Description**

    What a function of lists of tensors returns, of large tensors on a CPU computed block by block, so that what it
    touches stays in a core's cache, and little is held.

    **Arguments**

    * **function** (callable) - Takes lists of tensors of the same shapes, among other things, and returns such lists.
    * **columns** (sequence) - Its arguments. If shapes differ it is called as it is.
    * **consumed** (int, *optional*, default=None) - Which of the lists is emptied: its tensors are let go as they are
        used.
    * **written** (tuple, *optional*, default=None) - Which result may be written to which of the lists' tensors. Fresh
        memory costs more than what is computed.
    """
    lists = [k for k, column in enumerate(columns) if isinstance(column, (list, tuple))]
    first = columns[lists[0]]
    large = True in [t.numel() > BLOCK and t.device.type == "cpu" for t in first]
    if not large or any(t.shape != first[i].shape for k in lists for i, t in enumerate(columns[k])):
        return function(*columns)
    found = []
    for i, whole in enumerate(first):
        outputs: List[Tensor] = []
        for number, parts in enumerate(zip(*[columns[k][i].reshape(-1).split(BLOCK) for k in lists])):
            own = list(columns)
            for k, part in zip(lists, parts):
                own[k] = [part]
            results = function(*own)
            if not outputs:
                outputs = [torch.empty_like(whole, memory_format=torch.contiguous_format) for _ in results]
                if written is not None and columns[written[1]][i].is_contiguous():
                    outputs[written[0]] = columns[written[1]][i]
            for output, result in zip(outputs, results):
                output.view(-1)[number * BLOCK : number * BLOCK + BLOCK].copy_(result[0])
        if consumed is not None:
            columns[consumed][i] = None
        found.append(outputs)
    return list(zip(*found))


def check_model(model: nn.Module) -> None:
    """Raises where a model's parameters cannot be random variables."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    modules = list(model.modules())
    if any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in modules):
        raise ModelError("model is torch.compile'd, and its program cannot take other weights. Wrap the model itself.")
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        if nn.parameter.is_lazy(p):
            raise ModelError(f"model: parameter '{name}' has no shape yet. Call the model on a batch before wrapping.")
        if not p.is_floating_point():
            raise ModelError(
                f"model: parameter '{name}' is {p.dtype}, but weights must be real numbers. "
                "Register it as a buffer, or split it into real tensors."
            )
    if not any(p.requires_grad for p in parameters.values()):
        raise ModelError(
            "model has no trainable parameter, so there is nothing to infer. "
            "Call requires_grad_(True) on the layers that tasks should adapt."
        )
    devices = {p.device for p in parameters.values()}
    if len(devices) > 1:
        raise ModelError(f"model is spread over {sorted(map(str, devices))}; move it to one device first.")


def key_differences(own: Mapping[str, Tensor], given: Mapping[str, Tensor], strict: bool = True) -> List[str]:
    """What keeps a state dict from being loaded, entry by entry; names matter if `strict`."""
    differences: List[str] = []
    if strict:
        differences += [f"'{k}' is missing" for k in own if k not in given]
        differences += [f"'{k}' is unknown" for k in given if k not in own]
    return differences + [
        f"'{k}' has shape {tuple(given[k].shape)} instead of {tuple(own[k].shape)}"
        for k in own
        if k in given and given[k].shape != own[k].shape
    ]


class Replica:
    """
    **Description**

    A copy of a model's modules that shares what they hold, and in which weights can be read and replaced. A weight
    that modules share is one weight in several places, and so is one of a module that is registered twice
    (`torch.func.functional_call` leaves that one replaced: https://github.com/pytorch/pytorch/issues/164759).

    **Arguments**

    * **model** (Module) - The model.
    * **tensors** (sequence) - Those of its parameters and buffers that are replaced.
    * **copy** (bool, *optional*, default=True) - Whether weights go into a copy, or into the model itself.
    """

    def __init__(self, model: nn.Module, tensors: Sequence[Tensor], copy: bool = True):
        self._index = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._places: List[Tuple[dict, str, int]] = []
        self._recurrent: List[Any] = []  # RNNs read their weights from a list of their own
        self._keep = not copy
        self.module = self._copy(model, {})
        first = {i: (owner, key) for owner, key, i in reversed(self._places)}
        self._first = [first[self._index[id(tensor)]] for tensor in tensors]

    def _copy(self, module: nn.Module, memo: Dict[int, nn.Module]) -> nn.Module:
        twin = memo.get(id(module))
        if twin is None:
            memo[id(module)] = twin = module if self._keep else module.__new__(type(module))
            children = {k: None if m is None else self._copy(m, memo) for k, m in module._modules.items()}
            parameters, buffers = module._parameters, module._buffers
            if not self._keep:
                parameters, buffers = parameters.copy(), buffers.copy()
                own = {"_modules": children, "_forward_pre_hooks": OrderedDict(module._forward_pre_hooks)}
                twin.__dict__.update(module.__dict__, _parameters=parameters, _buffers=buffers, **own)
            for held in (parameters, buffers):
                self._places += [(held, k, self._index[id(t)]) for k, t in held.items() if id(t) in self._index]
            if "_flat_weights_names" in twin.__dict__:
                self._recurrent.append(twin)
        return twin

    def get(self) -> List[Tensor]:
        """The weights as they are now."""
        return [owner[key] for owner, key in self._first]

    def put(self, weights: Sequence[Tensor]) -> None:
        """Replaces the weights, whose graph is kept."""
        for owner, key, i in self._places:
            owner[key] = weights[i]
        for module in self._recurrent:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def run_with(reference: Callable[[], Optional[Replica]], weights: Sequence[Tensor], call: Callable) -> Any:
    """The result of a call with these weights in the model, if it still exists. Its own weights are put back."""
    replica = reference()
    if replica is None:
        return call()
    own = replica.get()
    replica.put(weights)
    try:
        return call()
    finally:
        replica.put(own)


def replica_by_name(model: nn.Module, names: Iterable[str]) -> Replica:
    """A replica in which the parameters and buffers of these names are replaced; those that are tied have several."""
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    unknown = [name for name in names if name not in tensors]
    if unknown:
        raise ArgumentError(f"weights: the model has no parameter or buffer '{min(unknown)}'.")
    return Replica(model, [tensors[name] for name in names])


def batch_size(outputs: Any, inputs: Any) -> Optional[int]:
    """The number of examples in a forward: a prediction's own, or the first dimension of what came out, or went in."""
    if hasattr(outputs, "nll"):  # a head's prediction knows its own
        return outputs.n
    shape = getattr(outputs, "batch_shape", None)  # a distribution's
    shapes = [a.shape for a in arrays_in(outputs)] if shape is None else [shape]
    found = [s[0] for s in shapes if len(s)] or [a.shape[0] for a in arrays_in(inputs) if a.ndim]
    return found[0] if found else None


def arrays_in(nest: Any, depth: int = 0) -> List[Any]:
    """Every tensor and array in nested containers, distributions and other objects' attributes, in order."""
    if isinstance(nest, (Tensor, np.ndarray)):
        return [nest]
    if depth > 8 or isinstance(nest, (nn.Module, str, type)):
        return []
    if isinstance(nest, Mapping):
        nest = nest.values()
    elif not isinstance(nest, (tuple, list)):
        nest = getattr(nest, "__dict__", {}).values()
    return [array for value in nest for array in arrays_in(value, depth + 1)]
