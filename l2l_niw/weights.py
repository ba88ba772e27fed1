"""A model's random weights as one flat vector, and back."""

from functools import reduce
from typing import Dict, List, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from l2l_niw.errors import ModelError


def check_parameters(model: nn.Module) -> None:
    """Raises where a model's parameters cannot be real random variables held in one vector."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
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


class Layout:
    """
    **Description**

    Which parameters of a model are random (those that require gradients), in the order and the
    shapes in which they stand in the flat vector. A shared parameter stands there once.
    """

    def __init__(self, model: nn.Module):
        random = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names: List[str] = [name for name, _ in random]
        self.shapes: List[torch.Size] = [p.shape for _, p in random]
        self.dtypes: List[torch.dtype] = [p.dtype for _, p in random]
        self.sizes: List[int] = [p.numel() for _, p in random]
        self.frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        self.d = sum(self.sizes)
        self.dtype = reduce(torch.promote_types, self.dtypes, torch.float32)
        self.uniform = all(dtype == self.dtype for dtype in self.dtypes)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """One vector, in float32 at least: chains and closed forms are no work for half precision."""
        return torch.cat([t.reshape(-1) for t in tensors]).to(self.dtype)

    def split(self, flat: Tensor, cast: bool = True) -> List[Tensor]:
        """Views of a flat vector, or of several, (..., d), in the parameters' shapes and, for weights, their dtypes."""
        lead = flat.shape[:-1]
        parts = [part.view(lead + shape) for part, shape in zip(flat.split(self.sizes, -1), self.shapes)]
        if not cast or self.uniform and flat.dtype == self.dtype:
            return parts
        return [part.to(dtype) for part, dtype in zip(parts, self.dtypes)]

    def keep(self, new: Tensor, old: Tensor, used: Sequence[bool]) -> Tensor:
        """The new weights, but the old ones of parameters that are not used."""
        if all(used):
            return new
        parts = zip(new.split(self.sizes, -1), old.split(self.sizes, -1), used)
        return torch.cat([after if u else before for after, before, u in parts], -1)

    def named(self, flat: Tensor, cast: bool = True) -> Dict[str, Tensor]:
        return dict(zip(self.names, self.split(flat, cast)))


def replica(module: nn.Module, memo: Optional[Dict[int, nn.Module]] = None) -> nn.Module:
    """A copy of the modules and of nothing that they hold; other weights can be put into it."""
    memo = {} if memo is None else memo
    if id(module) not in memo:
        memo[id(module)] = twin = module.__new__(type(module))
        twin.__dict__ = module.__dict__.copy()
        twin._parameters, twin._buffers = module._parameters.copy(), module._buffers.copy()
        twin._modules = {k: m if m is None else replica(m, memo) for k, m in module._modules.items()}
    return memo[id(module)]


class Slots:
    """Every place in a module that holds a random weight; a shared weight has several."""

    def __init__(self, module: nn.Module, names: Sequence[str]):
        order = {name: i for i, name in enumerate(names)}
        index = {id(p): order[name] for name, p in module.named_parameters() if name in order}
        held = [(m._parameters, k, p) for m in module.modules() for k, p in m._parameters.items()]
        self.places = [(parameters, k, index[id(p)]) for parameters, k, p in held if id(p) in index]
        # RNNs read their weights from a list of their own
        self.recurrent = [m for m in module.modules() if hasattr(m, "_flat_weights_names")]

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Writes weights into the module, keeping their graph."""
        for parameters, key, i in self.places:
            parameters[key] = tensors[i]
        for owner in self.recurrent:
            owner._flat_weights = [getattr(owner, name, None) for name in owner._flat_weights_names]
