"""A model's random weights as a list of tensors, and the model as a function of them."""

from collections import OrderedDict
from functools import lru_cache
from operator import itemgetter
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2l_niw.errors import ArgumentError, ModelError


@lru_cache(maxsize=256)
def picker(indices: Tuple[int, ...]) -> Callable[[Sequence], Sequence]:
    """Takes these entries of a sequence, in one call."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1) if indices else slice(0))


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
    that modules share is one weight in several places.

    **Arguments**

    * **model** (Module) - The model.
    * **names** (list) - The names of its random weights.
    * **copy** (bool, *optional*, default=True) - Whether weights go into a copy, or into the model itself.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], copy: bool = True):
        parameters = dict(model.named_parameters())
        self._index = {id(parameters[name]): i for i, name in enumerate(names)}
        self._places: List[Tuple[dict, str, int]] = []
        self._recurrent: List[nn.Module] = []  # RNNs read their weights from a list of their own
        self._keep = not copy
        self.module = self._copy(model, {})
        first = {i: (owner, key) for owner, key, i in reversed(self._places)}
        self._first = [first[i] for i in range(len(names))]

    def _copy(self, module: nn.Module, memo: Dict[int, nn.Module]) -> nn.Module:
        twin = memo.get(id(module))
        if twin is None:
            memo[id(module)] = twin = module if self._keep else module.__new__(type(module))
            children = {k: None if m is None else self._copy(m, memo) for k, m in module._modules.items()}
            parameters = module._parameters
            if not self._keep:
                parameters = parameters.copy()
                hooks = OrderedDict(module._forward_pre_hooks)
                own = {"_buffers": module._buffers.copy(), "_modules": children, "_forward_pre_hooks": hooks}
                twin.__dict__.update(module.__dict__, _parameters=parameters, **own)
            self._places += [(parameters, k, self._index[id(p)]) for k, p in parameters.items() if id(p) in self._index]
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


class Stateless:
    """
    **Description**

    A module as a function of its parameters and buffers, as `torch.func.functional_call`. That one leaves other
    weights in a module that is registered twice, as in learn2learn's OmniglotCNN
    (https://github.com/pytorch/pytorch/issues/164759); here every place is written to once, and once again.

    **Arguments**

    * **module** (Module) - The module. Its parameters and buffers are looked up now.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        places: Dict[int, List[str]] = {}
        for prefix, owner in module.named_modules():  # each once, whatever its names
            for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
                places.setdefault(id(tensor), []).append(f"{prefix}.{key}" if prefix else key)
        self._places = {name: places[id(tensor)] for name, tensor in tensors}

    def __call__(self, tensors: Mapping[str, Tensor], args: tuple, kwargs: dict) -> Any:
        unknown = tensors.keys() - self._places.keys()
        if unknown:
            raise ArgumentError(f"weights: the model has no parameter or buffer '{min(unknown)}'.")
        everywhere = {place: t for name, t in tensors.items() for place in self._places[name]}
        return functional_call(self.module, everywhere, args, kwargs, tie_weights=False)


def batch_size(outputs: Any, inputs: Any) -> Optional[int]:
    """The number of examples in a forward: a prediction's own, or the first dimension of what came out, or went in."""
    if hasattr(outputs, "nll"):  # a head's prediction knows its own
        return outputs.n
    for nest in (outputs, inputs):
        for tensor in tensors_in(nest):
            if tensor.dim() > 0:
                return tensor.shape[0]
    return None


def tensors_in(nest: Any) -> List[Tensor]:
    """Every tensor in nested tuples, lists, dicts and distributions' batches, in order."""
    if isinstance(nest, Tensor):
        return [nest]
    if isinstance(nest, Mapping):
        return [t for value in nest.values() for t in tensors_in(value)]
    if isinstance(nest, (tuple, list)):
        return [t for value in nest for t in tensors_in(value)]
    if hasattr(nest, "batch_shape"):
        return [torch.empty(nest.batch_shape, device="meta")] if len(nest.batch_shape) else []
    return [torch.as_tensor(nest)] if type(nest).__module__ == "numpy" and nest.dtype.kind in "fiub" else []
