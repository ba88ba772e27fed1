"""How an NIW infers: its options, checked once when it is built."""

from dataclasses import dataclass
from typing import Tuple

from l2l_niw.checks import check_number
from l2l_niw.curvature import SGLD, Curvature
from l2l_niw.errors import ArgumentError
from l2l_niw.wishart import WISHARTS

TRACES = ("readout", "first", "none", "full")


@dataclass
class Options:
    """
    **Description**

    What `NIW` documents under **Arguments**. They may be changed between episodes, for instance to
    warm `niw.options.kl_weight` up.
    """

    burn_in: int
    temperature: float
    precision_range: Tuple[float, float]
    curvature: Curvature
    wishart: str
    kl_weight: float
    auto_kl: bool
    trace: str
    precondition: bool

    def __post_init__(self) -> None:
        check_number("burn_in", self.burn_in, 0, whole=True)
        check_number("temperature", self.temperature, 0)
        check_number("kl_weight", self.kl_weight, 0)
        self._check_range()
        for name, names in (("wishart", WISHARTS), ("trace", TRACES)):
            if getattr(self, name) not in names:
                raise ArgumentError(f"{name} must be one of {names}, got {getattr(self, name)!r}.")
        if self.temperature == 0 and (self.kl_weight or not isinstance(self.curvature, SGLD)):
            raise ArgumentError(
                "temperature=0 makes the posterior a spike, whose KL is infinite: leave kl_weight and curvature at "
                "their defaults, or choose a small temperature."
            )
        if self.trace == "full" and self.kl_weight:
            raise ArgumentError("trace='full' keeps the steps' graph, as MAML does, and has no KL: set kl_weight=0.")

    def _check_range(self) -> None:
        try:
            floor, ceiling = self.precision_range
            right = 0 < floor <= ceiling
        except (TypeError, ValueError):
            right = False
        if not right:
            raise ArgumentError(
                f"precision_range must be (floor, ceiling) with 0 < floor <= ceiling, got {self.precision_range!r}."
            )
