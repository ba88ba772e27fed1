"""MAML and its kin: a linear head, and inner steps."""

from functools import partial
from typing import Any, Callable, Dict

import learn2learn as l2l
from torch import nn

from l2l_niw.algorithms.special_cases import reptile
from l2l_niw.vision.backbone import make_backbone
from l2l_niw.vision.config import Config
from l2l_niw.vision.loops import ANIL, GradientBased, Method, Reptile
from l2l_niw.vision.methods.spec import Spec


def linear_head(make: Callable) -> Callable[[Config], Method]:
    """A builder of methods on a backbone with a linear head, which starts at 0: classes do not differ beforehand."""

    def made(config: Config) -> Method:
        body = make_backbone(config)
        linear = nn.Linear(body.features, config.ways)
        for p in linear.parameters():
            nn.init.zeros_(p)
        return make(body, linear, config)

    return made


def maml(body: nn.Module, linear: nn.Module, config: Config, first_order: bool = False) -> Method:
    """learn2learn's MAML."""
    algorithm = l2l.algorithms.MAML(nn.Sequential(body, linear), lr=config.inner_lr, first_order=first_order)
    return GradientBased(algorithm, config.steps)  # type: ignore[arg-type]


def anil(body: nn.Module, linear: nn.Module, config: Config) -> Method:
    """MAML on the last layer."""
    return ANIL(body, l2l.algorithms.MAML(linear, lr=config.inner_lr), config.steps)  # type: ignore[arg-type]


def reptile_method(body: nn.Module, linear: nn.Module, config: Config) -> Method:
    """Reptile."""
    return Reptile(reptile(nn.Sequential(body, linear), config.inner_lr), config.steps)  # type: ignore[arg-type]


STEPS: Dict[str, Any] = {"inner_lr": 0.03, "steps": 5}
GRADIENT: Dict[str, Spec] = {
    "maml": Spec("MAML", linear_head(maml), **STEPS),
    "maml-batch": Spec("MAML, transductive", linear_head(maml), **STEPS, transductive=True, settings_of="maml"),
    "fomaml": Spec("first-order MAML", linear_head(partial(maml, first_order=True)), **STEPS),
    "anil": Spec("ANIL", linear_head(anil), inner_lr=0.1, steps=5),
    "reptile": Spec("Reptile", linear_head(reptile_method), **STEPS),
}
