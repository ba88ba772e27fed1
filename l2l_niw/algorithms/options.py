"""How an NIW infers: its options, checked whenever one is set."""

import math
from typing import Any, Optional, Tuple, Union

from l2l_niw.checks import check_number
from l2l_niw.errors import ArgumentError
from l2l_niw.inference.chain import Settings
from l2l_niw.inference.curvature import SGLD, Curvature, make_curvature
from l2l_niw.inference.last_layer import SECOND_ORDER
from l2l_niw.inference.wishart import WISHARTS

INFERENCE = ("langevin", "closed_form")
CHOICES = {"inference": INFERENCE, "second_order": SECOND_ORDER, "wishart": WISHARTS}
SMALLEST, LARGEST = 1e-18, 1e18  # float32 has room for products of such numbers


class Options:
    """
    **Description**

    What `NIW` documents under **Arguments**. They may be changed between episodes, for instance to warm
    `niw.options.kl_weight` up; `kl_weight` follows the temperature until it is set.
    """

    inference: str
    second_order: str
    average_iterates: bool
    burn_in: int
    temperature: float
    precision_bounds: Tuple[float, float]
    curvature: Curvature
    wishart: str
    add_kl_gradient: bool
    learn_step_sizes: bool

    def __init__(self, kl_weight: Optional[float] = None, **options: Any):
        self.__dict__.update(options, _kl_weight=kl_weight, curvature=make_curvature(options["curvature"]))
        self._check()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and name != "kl_weight":
            raise ArgumentError(f"options: there is no option '{name}'. There are: {', '.join(sorted(self.names()))}.")
        if name == "wishart":
            raise ArgumentError("options: wishart cannot be changed, since n_0's domain depends on it. Wrap anew.")
        before = dict(self.__dict__)
        key = "_kl_weight" if name == "kl_weight" else name
        self.__dict__[key] = make_curvature(value) if name == "curvature" else value
        try:
            self._check()
        except ArgumentError:
            self.__dict__.update(before)
            raise

    def names(self) -> set:
        return {"kl_weight", *(name for name in self.__dict__ if not name.startswith("_"))}

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={getattr(self, name)!r}' for name in sorted(self.names()))})"

    @property
    def kl_weight(self) -> float:
        return self.temperature if self._kl_weight is None else self._kl_weight

    def settings(self, lr: float) -> Settings:
        """Those that a chain needs."""
        return Settings(
            lr,
            self.temperature,
            self.curvature.noisy,
            self.learn_step_sizes,
            self.inference == "langevin",
            self.burn_in if self.average_iterates else None,
            self.precision_bounds,
        )

    def _check(self) -> None:
        check_number("burn_in", self.burn_in, 0, whole=True)
        for name in ("temperature", "kl_weight"):
            value: Union[float, Any] = getattr(self, name)
            if not isinstance(value, (int, float)) or value != 0:
                check_number(name, value, SMALLEST, high=LARGEST, or_zero=True)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(f"{name} must be one of {choices}, got {getattr(self, name)!r}.")
        for name in ("average_iterates", "add_kl_gradient", "learn_step_sizes"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        self._check_bounds()
        if self.temperature == 0 and (self.kl_weight or not isinstance(self.curvature, SGLD)):
            raise ArgumentError(
                "temperature=0 makes the posterior a spike, whose KL is infinite: leave kl_weight and curvature at "
                "their defaults, or choose a small temperature."
            )

    def _check_bounds(self) -> None:
        try:
            floor, ceiling = self.precision_bounds
            right = 0 < floor <= ceiling and not math.isnan(ceiling)
        except (TypeError, ValueError):
            right = False
        if not right:
            raise ArgumentError(
                f"precision_bounds must be (floor, ceiling) with 0 < floor <= ceiling, got {self.precision_bounds!r}."
            )
