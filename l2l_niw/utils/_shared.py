"""Modules that all sampled networks have in common: what they compute of the same tensors is computed once."""

from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor, nn

Calls = List[Tuple[Tuple[Tensor, ...], Tensor, List[int]]]


def shared_modules(module: nn.Module, random: Sequence[str], prefix: str = "") -> Iterator[Tuple[str, nn.Module]]:
    """The largest submodules in evaluation mode, so that they compute the same every time, without random weights."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        own = any(key.startswith(f"{path}.") for key in random)
        if own or any(part.training for part in child.modules()):
            yield from shared_modules(child, random, f"{path}.")
        else:
            yield path, child


def versions(tensors: Sequence[Tensor]) -> List[int]:
    return [t._version for t in tensors]


class Once:
    """
    **Description**

    A module's forward that returns what it returned before, if it is called with the same tensors, and neither they nor
    the output have been written to since.

    **Arguments**

    * **forward** (callable) - The module's own.
    * **calls** (list) - Inputs and outputs so far, which networks share.
    """

    def __init__(self, forward: Callable, calls: Calls):
        self.forward, self.calls = forward, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or torch.is_inference_mode_enabled() or not all(isinstance(a, Tensor) for a in args):
            return self.forward(*args, **kwargs)
        for given, output, then in self.calls:
            same = len(given) == len(args) and all(a is b for a, b in zip(given, args))
            if same and versions((*given, output)) == then:
                return output
        output = self.forward(*args)
        if isinstance(output, Tensor):
            self.calls.append((args, output, versions((*args, output))))
        return output


def compute_once(module: nn.Module, random: Sequence[str], calls: Dict[str, Calls]) -> None:
    """
    **Description**

    Makes the shared modules of a copy of a network remember what they compute, in place.

    **Arguments**

    * **module** (Module) - The copy.
    * **random** (sequence) - Names of the weights that differ between networks.
    * **calls** (dict) - By module; the same dict for all copies.
    """
    for name, part in shared_modules(module, random):
        part.__dict__["forward"] = Once(part.forward, calls.setdefault(name, []))
