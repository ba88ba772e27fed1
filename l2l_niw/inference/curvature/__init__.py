"""Where A, the curvature of an episode's loss, comes from: strategies chosen by name."""

from typing import Union

from l2l_niw.errors import ArgumentError
from l2l_niw.inference.curvature.ggn import GGN
from l2l_niw.inference.curvature.sgld import SGLD

Curvature = Union[SGLD, GGN]
__all__ = ["GGN", "SGLD", "Curvature", "make_curvature"]

STRATEGIES = {"sgld": SGLD, "ggn": GGN}


def make_curvature(curvature: Union[str, Curvature]) -> Curvature:
    """A strategy from its name, or the strategy itself."""
    if isinstance(curvature, str):
        if curvature not in STRATEGIES:
            raise ArgumentError(f"curvature must be one of {tuple(STRATEGIES)} or a strategy, got {curvature!r}.")
        return STRATEGIES[curvature]()
    if not isinstance(curvature, tuple(STRATEGIES.values())):
        raise ArgumentError(f"curvature must be a name or a strategy such as GGN(), got {curvature!r}.")
    return curvature
