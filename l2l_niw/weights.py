"""A model's random weights as one flat vector, and back."""

from collections import OrderedDict
from contextlib import contextmanager
from functools import reduce
from itertools import accumulate
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2l_niw.errors import ArgumentError, ModelError
from l2l_niw.vectors import concatenate


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

    **Arguments**

    * **parameters** (dict) - The model's named parameters.
    """

    def __init__(self, parameters: Mapping[str, Tensor]):
        random = [(name, p) for name, p in parameters.items() if p.requires_grad]
        self.names: List[str] = [name for name, _ in random]
        self.shapes: List[torch.Size] = [p.shape for _, p in random]
        self.dtypes: List[torch.dtype] = [p.dtype for _, p in random]
        self.sizes: List[int] = [p.numel() for _, p in random]
        self.index: Dict[int, int] = {id(p): i for i, (_, p) in enumerate(random)}
        self.frozen = [name for name, p in parameters.items() if not p.requires_grad]
        self.d = sum(self.sizes)
        strides = [torch.empty(shape, device="meta").stride() for shape in self.shapes]
        self._places = list(zip(self.shapes, strides, accumulate(self.sizes, initial=0)))
        self.dtype = reduce(torch.promote_types, self.dtypes, torch.float32)
        self.uniform = all(dtype == self.dtype for dtype in self.dtypes)
        self.readout: Any = None  # its place, if there is one

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """One vector, in float32 at least: chains and closed forms are no work for half precision."""
        return concatenate(tensors, self.dtype)

    def split(self, flat: Tensor, cast: bool = True) -> List[Tensor]:
        """Views of a flat vector, or of several, (..., d), in the parameters' shapes and, for weights, their dtypes."""
        lead = flat.shape[:-1]
        parts = [part.view(lead + shape) for part, shape in zip(flat.split(self.sizes, -1), self.shapes)]
        if not cast or self.uniform and flat.dtype == self.dtype:
            return parts
        return [part.to(dtype) for part, dtype in zip(parts, self.dtypes)]

    def pieces(self, flat: Tensor) -> List[Tensor]:
        """As `split`, for one vector and where no graph is recorded: a third of the time, in one look-up a weight."""
        parts = [flat.as_strided(*place) for place in self._places]  # of a vector that is no view
        return parts if self.uniform else [part.to(dtype) for part, dtype in zip(parts, self.dtypes)]

    def keep(self, new: Tensor, old: Tensor, used: Sequence[bool]) -> Tensor:
        """The new weights, but the old ones of parameters that are not used."""
        if all(used):
            return new
        parts = zip(new.split(self.sizes, -1), old.split(self.sizes, -1), used)
        return torch.cat([after if u else before for after, before, u in parts], -1)

    def named(self, flat: Tensor, cast: bool = True) -> Dict[str, Tensor]:
        return dict(zip(self.names, self.split(flat, cast)))


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

    def has(self, name: str) -> bool:
        """Whether there is a parameter or a buffer of this name."""
        return name in self._places

    def __call__(self, tensors: Mapping[str, Tensor], args: tuple, kwargs: dict) -> Any:
        unknown = tensors.keys() - self._places.keys()
        if unknown:
            raise ArgumentError(f"weights: the model has no parameter or buffer '{min(unknown)}'.")
        everywhere = {place: t for name, t in tensors.items() for place in self._places[name]}
        return functional_call(self.module, everywhere, args, kwargs, tie_weights=False)


class Replica:
    """
    **Description**

    A copy of a model's modules, and of nothing that they hold, into which other weights can be put.

    **Arguments**

    * **model** (Module) - The model.
    * **layout** (Layout) - Its random weights.
    """

    def __init__(self, model: nn.Module, layout: Layout):
        self._places: List[Tuple[dict, str, int]] = []  # a shared weight has several
        self._recurrent: List[nn.Module] = []  # RNNs read their weights from a list of their own
        self._held: Sequence[Tensor] = ()
        self.module = self._copy(model, layout.index, {})

    def _copy(self, module: nn.Module, index: Dict[int, int], memo: Dict[int, nn.Module]) -> nn.Module:
        twin = memo.get(id(module))
        if twin is None:
            memo[id(module)] = twin = module.__new__(type(module))
            parameters = module._parameters.copy()
            twin.__dict__.update(
                module.__dict__,
                _parameters=parameters,
                _buffers=module._buffers.copy(),
                _modules={k: None if m is None else self._copy(m, index, memo) for k, m in module._modules.items()},
            )
            self._places += [(parameters, k, index[id(p)]) for k, p in parameters.items() if id(p) in index]
            if "_flat_weights_names" in twin.__dict__:
                self._recurrent.append(twin)
        return twin

    @contextmanager
    def watching(self, name: Optional[str], record: Callable[[tuple, Any], Any]) -> Iterator[list]:
        """A list of what is recorded of the arguments and the outputs of one of the modules' calls, meanwhile."""
        seen: list = []
        if name is None:
            yield seen
            return
        module = self.module.get_submodule(name)
        before = module._forward_hooks  # the model's own
        module._forward_hooks = OrderedDict(before)
        module.register_forward_hook(lambda module, args, outputs: seen.append(record(args, outputs)))
        try:
            yield seen
        finally:
            module._forward_hooks = before

    def without(self, name: str) -> nn.Module:
        """The copy without one of its modules: what that one got comes out of its place."""
        gone = self.module.get_submodule(name)
        if gone is self.module:
            return nn.Identity()
        for module in self.module.modules():
            module._modules.update({key: nn.Identity() for key, own in module._modules.items() if own is gone})
        for owner in self._recurrent:
            owner._flat_weights = list(owner._flat_weights)  # which calls write to
        return self.module

    def put(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Writes weights into the module, keeping their graph, and returns those that were there before."""
        before, self._held = self._held, tensors
        for parameters, key, i in self._places:
            parameters[key] = tensors[i]
        for owner in self._recurrent:
            owner._flat_weights = [getattr(owner, name, None) for name in owner._flat_weights_names]
        return before
