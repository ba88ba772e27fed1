"""How an NIW infers: its options, checked whenever one is set."""

import math
from typing import Any, Dict, Optional

from l2l_niw.errors import ArgumentError
from l2l_niw.inference.chain import Settings
from l2l_niw.inference.curvature import SGLD, make_curvature
from l2l_niw.inference.laplace import RADIUS
from l2l_niw.inference.last_layer import SECOND_ORDER
from l2l_niw.inference.likelihood import LIKELIHOODS, LOGITS
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
LATENT_DEFAULTS = {  # with rank or curvature='full', where a step is Gauss-Newton's
    "second_order": "all",
    "temperature": 1.0,
    "likelihood": "auto",
    "linearise": "variances",
    "radius": RADIUS,
    "wishart": "factorised",
    "kl_weight": None,
    "add_kl_gradient": True,
}
CHOICES = {
    "inference": ("langevin", "closed_form"),
    "second_order": SECOND_ORDER,
    "wishart": WISHARTS,
    "likelihood": LIKELIHOODS,
    "linearise": ("variances", "all", "none"),
    **dict.fromkeys(("average_iterates", "add_kl_gradient", "learn_step_sizes"), (True, False)),
}
LATENT_CHOICES = {**CHOICES, "second_order": ("none", "last_step", "all")}
SMALLEST, LARGEST = 1e-18, 1e18  # float32 has room for products of such numbers


class Options:
    """
    **Description**

    What `NIW` documents under **Arguments**. They may be changed between episodes, for instance to warm
    `niw.options.kl_weight` up; `kl_weight` follows the temperature until it is set.

    **Arguments**

    * **latent** (bool, *optional*, default=False) - Whether they are those of Gauss-Newton steps, with `rank` or
        curvature='full', instead of a chain's.
    * **options** - By name.
    """

    def __init__(self, latent: bool = False, **options: Any):
        self.__dict__["latent"] = latent
        self._set({**self._defaults(), **options})

    def _defaults(self) -> Dict[str, Any]:
        return LATENT_DEFAULTS if self.latent else DEFAULTS

    def __getattr__(self, name: str) -> Any:
        if name == "kl_weight":
            return self.temperature
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "wishart":
            raise ArgumentError("options: wishart cannot be changed, since n_0's domain depends on it. Wrap anew.")
        self._set({**{k: v for k, v in self.__dict__.items() if k != "latent"}, name: value})

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={getattr(self, name)!r}' for name in self._defaults())})"

    def widens(self, likelihood: Optional[str]) -> bool:
        """Whether a query's outputs have the posterior's spread in them, if they parametrise this likelihood."""
        return self.linearise == "all" or self.linearise == "variances" and likelihood not in LOGITS

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
        latent, known = self.latent, self._defaults()
        for name, value in options.items():
            if name not in known:
                here = " with rank or curvature='full'" if latent else ""
                raise ArgumentError(
                    f"options: there is no option '{name}'{here}. There are: {', '.join(sorted(known))}."
                )
            choices = (LATENT_CHOICES if latent else CHOICES).get(name)
            if choices and not any(type(value) is type(choice) and value == choice for choice in choices):
                raise ArgumentError(f"{name} must be one of {choices}, got {value!r}.")
        options = dict(options)
        if options.get("kl_weight") is None:
            options.pop("kl_weight", None)
        for name in ("temperature", "kl_weight"):
            if options.get(name, 0) != 0:
                check_number(name, options[name], SMALLEST, high=LARGEST, or_zero=True)
        (check_latent if latent else check_chain)(options)
        self.__dict__.clear()
        self.__dict__.update(options, latent=latent)


def check_latent(options: Dict[str, Any]) -> None:
    """Raises where an option of Gauss-Newton steps is outside its domain."""
    check_number("radius", options["radius"], 0, strict=True)
    if options["temperature"] == 0:
        raise ArgumentError("temperature must be above 0 with rank or curvature='full': at 0 there is no posterior.")


def check_chain(options: Dict[str, Any]) -> None:
    """Raises where a chain's option is outside its domain, and makes the curvature's strategy."""
    options["curvature"] = make_curvature(options["curvature"])
    check_number("burn_in", options["burn_in"], 0, whole=True)
    try:
        floor, ceiling = options["precision_bounds"]
        right = 0 < floor <= ceiling
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ArgumentError(
            f"precision_bounds must be (floor, ceiling) with 0 < floor <= ceiling, got {options['precision_bounds']!r}."
        )
    if options["temperature"] == 0 and (options.get("kl_weight") or not isinstance(options["curvature"], SGLD)):
        raise ArgumentError(
            "temperature=0 makes the posterior a spike, whose KL is infinite: leave kl_weight and curvature at "
            "their defaults, or choose a small temperature."
        )
