"""Which of a model's weights are random: a task's own, under the posterior. The others are shared by all tasks."""

from fnmatch import fnmatchcase
from typing import Callable, Iterable, List, Sequence, Set, Union

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from l2l_niw.errors import ArgumentError

Selection = Union[str, Sequence[str], Callable[[str, nn.Parameter], bool]]
PRESETS = ("all", "last_layer", "norm")
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)


def select(model: nn.Module, random: Selection) -> List[bool]:
    """
    **Description**

    For each of the model's parameters, whether it is random.

    **Arguments**

    * **model** (Module) - The model.
    * **random** (str, sequence or callable) - 'all'; 'last_layer', the linear layer that was registered last; 'norm',
        the parameters of normalisation layers; a name or a pattern such as 'layer4.*'; several of these; or a function
        of a parameter's name and the parameter.

    **Returns** a list of bool, in the order of `model.named_parameters()`.
    """
    named = list(model.named_parameters())
    if callable(random):
        chosen = {name for name, p in named if random(name, p)}
        if not chosen:
            raise ArgumentError("random: the function chose no parameter of the model.")
    else:
        wanted = [random] if isinstance(random, str) or not isinstance(random, Iterable) else list(random)
        if not wanted or not all(isinstance(one, str) for one in wanted):
            raise ArgumentError(f"random must be a name, names, or a function of name and parameter, got {random!r}.")
        chosen = set().union(*[_named(model, one) for one in wanted])
    if not any(p.requires_grad for name, p in named if name in chosen):
        raise ArgumentError("random: every parameter that it names is frozen. Call requires_grad_(True) on them.")
    return [name in chosen for name, _ in named]


def _named(model: nn.Module, wanted: str) -> Set[str]:
    """The parameters that a preset, a name or a pattern means."""
    named = dict(model.named_parameters())
    if wanted == "all":
        return set(named)
    if wanted in PRESETS:
        kinds = nn.Linear if wanted == "last_layer" else NORMS
        modules = [module for module in model.modules() if isinstance(module, kinds)]
        modules = modules[-1:] if wanted == "last_layer" else modules
        own = {id(p) for module in modules for p in module.parameters(recurse=False)}
        found = {name for name, p in named.items() if id(p) in own}
    else:
        found = {name for name in named if fnmatchcase(name, wanted)}
    if not found:
        raise ArgumentError(
            f"random: '{wanted}' means no parameter of the model. There are {', '.join(PRESETS)} and the names of "
            f"named_parameters(), such as '{next(iter(named))}', or patterns such as '*.bias'."
        )
    return found
