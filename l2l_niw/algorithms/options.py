"""How an NIW infers: its options, checked whenever one is set."""

import math
from typing import Any

from l2l_niw.errors import ArgumentError
from l2l_niw.inference.chain import Settings
from l2l_niw.inference.curvature import SGLD, make_curvature
from l2l_niw.inference.last_layer import SECOND_ORDER
from l2l_niw.inference.wishart import WISHARTS
from l2l_niw.utils._checks import check_number

DEFAULTS = {
    "inference": "langevin",
    "second_order": "last_layer",
    "average_iterates": False,
    "burn_in": 0,
    "temperature": 1e-4,
    "precision_bounds": (1e-4, math.inf),
    "curvature": "sgld",
    "wishart": "factorised",
    "kl_weight": None,
    "add_kl_gradient": True,
    "learn_step_sizes": True,
}
CHOICES = {
    "inference": ("langevin", "closed_form"),
    "second_order": SECOND_ORDER,
    "wishart": WISHARTS,
    **dict.fromkeys(("average_iterates", "add_kl_gradient", "learn_step_sizes"), (True, False)),
}
SMALLEST, LARGEST = 1e-18, 1e18  # float32 has room for products of such numbers


class Options:
    """
    **Description**

    What `NIW` documents under **Arguments**. They may be changed between episodes, for instance to warm
    `niw.options.kl_weight` up; `kl_weight` follows the temperature until it is set.
    """

    def __init__(self, **options: Any):
        self._set({**DEFAULTS, **options})

    def __getattr__(self, name: str) -> Any:
        if name == "kl_weight":
            return self.temperature
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "wishart":
            raise ArgumentError("options: wishart cannot be changed, since n_0's domain depends on it. Wrap anew.")
        self._set({**self.__dict__, name: value})

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={getattr(self, name)!r}' for name in DEFAULTS)})"

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

    def _set(self, options: dict) -> None:
        """Takes the options if all of them are right."""
        for name, value in options.items():
            if name not in DEFAULTS:
                raise ArgumentError(f"options: there is no option '{name}'. There are: {', '.join(sorted(DEFAULTS))}.")
            choices = CHOICES.get(name)
            if choices and not any(type(value) is type(choice) and value == choice for choice in choices):
                raise ArgumentError(f"{name} must be one of {choices}, got {value!r}.")
        options = {**options, "curvature": make_curvature(options["curvature"])}
        if options.get("kl_weight") is None:
            options.pop("kl_weight", None)
        check_number("burn_in", options["burn_in"], 0, whole=True)
        for name in ("temperature", "kl_weight"):
            if options.get(name, 0) != 0:
                check_number(name, options[name], SMALLEST, high=LARGEST, or_zero=True)
        try:
            floor, ceiling = options["precision_bounds"]
            right = 0 < floor <= ceiling
        except (TypeError, ValueError):
            right = False
        if not right:
            raise ArgumentError(
                "precision_bounds must be (floor, ceiling) with 0 < floor <= ceiling, got "
                f"{options['precision_bounds']!r}."
            )
        if options["temperature"] == 0 and (options.get("kl_weight") or not isinstance(options["curvature"], SGLD)):
            raise ArgumentError(
                "temperature=0 makes the posterior a spike, whose KL is infinite: leave kl_weight and curvature at "
                "their defaults, or choose a small temperature."
            )
        self.__dict__.clear()
        self.__dict__.update(options)
