"""The methods that are compared, all with the same backbone: their titles, defaults and constructors."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, List, Optional

import learn2learn as l2l
import torch
from torch import nn

from l2l_niw.algorithms import NIW
from l2l_niw.algorithms.special_cases import reptile
from l2l_niw.errors import ArgumentError
from l2l_niw.heads import LeaveOneOut, MetaQDA, NearestCentroid, Ridge
from l2l_niw.heads.episodic import EpisodicModel
from l2l_niw.vision.backbone import SHAPES, Backbone
from l2l_niw.vision.config import Config
from l2l_niw.vision.loops import ANIL, Episodic, GradientBased, Method, Reptile

METHOD_OPTIONS = ("lr", "inner_lr", "steps", "temperature", "prior_std", "samples")  # with a default per method


def linear_head(make: Callable) -> Callable:
    """A builder of methods on a classifier with a linear head."""

    def made(config: Config) -> Method:
        body = Backbone(config)
        return make(body, nn.Linear(body.features, config.ways), config)

    return made


def head(make: Callable, fixed: bool = False) -> Callable:
    """A builder of a head without NIW, on a backbone that is trained with it or stays as it was pretrained."""

    def made(config: Config) -> Method:
        body = Backbone(config).requires_grad_(not fixed)
        return Episodic(EpisodicModel(body, make(body.features)))

    return made


def niw(model: nn.Module, config: Config, second_order: str = "last_layer") -> NIW:
    """NIW around a model, with the config's options."""
    precision = None if config.prior_std is None else config.prior_std**-2
    options: Dict[str, Any] = {"temperature": config.temperature, "prior_precision": precision}
    return NIW(model, config.inner_lr, second_order=second_order, **options)  # type: ignore[arg-type]


def niw_full(body: nn.Module, linear: nn.Module, config: Config) -> Method:
    """
    NIW with the full covariance of the last layer's posterior at T = 1; the body is shared by all tasks. The layer
    starts at 0, as no class differs from another beforehand, and the support's evidence says nothing of new classes.
    """
    for p in linear.parameters():
        nn.init.zeros_(p)
    options: Dict[str, Any] = {"temperature": config.temperature, "prior_std": config.prior_std, "random": "last_layer"}
    algorithm = NIW(nn.Sequential(body, linear), lr=1.0, curvature="full", kl_weight=0.0, **options)
    return GradientBased(algorithm, config.steps)  # type: ignore[arg-type]


def niw_head(make: Callable) -> Callable:
    """A builder of a head under NIW. With two shots or more, inner steps predict each support image from the others."""

    def made(config: Config) -> Method:
        body = Backbone(config)
        own = make(body.features)
        model = EpisodicModel(body, own if config.shots == 1 else LeaveOneOut(own))
        return Episodic(niw(model, config, second_order="none"), config.steps, config.samples)  # type: ignore[arg-type]

    return made


def protonet_head(features: int) -> NearestCentroid:
    """ProtoNet's head: squared Euclidean distances to class means."""
    return NearestCentroid("euclidean", scale=5.0 / features, learn_scale=True)


def ridge_head(features: int) -> Ridge:
    """The regulariser starts at the size of a feature's squared norm: a small one would fit the support's noise."""
    return Ridge(lam=float(features), learn_lam=True, scale=10.0)


def qda_head(features: int, inference: str = "bayesian") -> MetaQDA:
    """MetaQDA's head, with initial covariances that are wide beside the features, so that logits start small."""
    spread = 10.0 * features if inference == "bayesian" else 30.0 * (2 * features + 4)
    return MetaQDA(features, inference, spread=spread)


qda_map_head = partial(qda_head, inference="map")


@dataclass(frozen=True)
class Spec:
    """
    **Description**

    A method of the comparison.

    **Arguments**

    * **title** (str) - Its name in tables.
    * **build** (callable) - From a config to a method.
    * **lr, inner_lr, steps, temperature, prior_std, samples** - Defaults of `METHOD_OPTIONS`; None for what the method
        does not have.
    * **baseline** (str, *optional*, default=None) - The method with the same network and without NIW.
    * **fixed** (bool, *optional*, default=False) - Whether the backbone stays as it was pretrained.
    """

    title: str
    build: Callable[[Config], Method]
    lr: float = 0.003
    inner_lr: Optional[float] = None
    steps: Optional[int] = None
    temperature: Optional[float] = None
    prior_std: Optional[float] = None
    samples: Optional[int] = None
    baseline: Optional[str] = None
    fixed: bool = False


def learn2learn_maml(first_order: bool) -> Callable:
    """A builder of learn2learn's MAML."""
    return linear_head(
        lambda body, linear, config: GradientBased(
            l2l.algorithms.MAML(nn.Sequential(body, linear), lr=config.inner_lr, first_order=first_order), config.steps
        )
    )


HEAD: Dict[str, Any] = {"inner_lr": 0.01, "steps": 3, "temperature": 1e-4, "prior_std": 0.05, "samples": 10}  # NIW's
METHODS: Dict[str, Spec] = {
    "maml": Spec("MAML", learn2learn_maml(False), inner_lr=0.1, steps=5),
    "fomaml": Spec("first-order MAML", learn2learn_maml(True), inner_lr=0.1, steps=5),
    "anil": Spec(
        "ANIL",
        linear_head(lambda body, linear, c: ANIL(body, l2l.algorithms.MAML(linear, lr=c.inner_lr), c.steps)),
        inner_lr=0.1,
        steps=5,
    ),
    "reptile": Spec(
        "Reptile",
        linear_head(lambda body, linear, c: Reptile(reptile(nn.Sequential(body, linear), c.inner_lr), c.steps)),
        inner_lr=0.1,
        steps=5,
    ),
    "protonet": Spec("ProtoNet", head(protonet_head)),
    "ridge": Spec("ridge (R2D2)", head(ridge_head)),
    "metaqda-map-fixed": Spec("MetaQDA, MAP, fixed backbone", head(qda_map_head, fixed=True), fixed=True),
    "metaqda-fixed": Spec("MetaQDA, Bayesian, fixed backbone", head(qda_head, fixed=True), fixed=True),
    "metaqda-map": Spec("MetaQDA, MAP", head(qda_map_head)),
    "metaqda": Spec("MetaQDA, Bayesian", head(qda_head)),
    "niw": Spec(
        "NIW, linear",
        linear_head(lambda body, linear, c: GradientBased(niw(nn.Sequential(body, linear), c), c.steps, c.samples)),
        inner_lr=0.1,
        steps=5,
        temperature=1e-4,
        samples=5,
        baseline="maml",
    ),
    "niw-full": Spec(
        "NIW, linear, full A", linear_head(niw_full), 0.001, steps=3, temperature=1.0, prior_std=10.0, baseline="maml"
    ),
    "niw-ncc": Spec("NIW, nearest centroid", niw_head(protonet_head), **HEAD, baseline="protonet"),
    "niw-ridge": Spec("NIW, ridge", niw_head(ridge_head), **HEAD, baseline="ridge"),
    "niw-qda": Spec("NIW, MetaQDA", niw_head(qda_head), **HEAD, baseline="metaqda"),
}


def trainable(config: Config) -> List[str]:
    """The methods that can be trained with a config: a fixed backbone has to be pretrained."""
    return [name for name, spec in METHODS.items() if config.pretraining or not spec.fixed]


def complete(config: Config) -> Config:
    """A config with the method's defaults in place of None, checked."""
    if config.method not in METHODS:
        raise ArgumentError(f"method must be one of {', '.join(METHODS)}; got {config.method!r}.")
    if config.dataset not in SHAPES:
        raise ArgumentError(f"dataset must be one of {', '.join(SHAPES)}; got {config.dataset!r}.")
    spec = METHODS[config.method]
    if spec.fixed and not config.pretraining:
        raise ArgumentError(
            f"pretraining must be 1 or more for {config.method}, whose backbone stays as it was pretrained. 10 will do."
        )
    return config.filled(**{name: getattr(spec, name) for name in METHOD_OPTIONS})


def build(config: Config) -> Method:
    """
    **Description**

    A method with its initial weights, as the config's seed gives them.

    **Arguments**

    * **config** (Config) - Its settings; the method's defaults where they are None.

    **Example**

    ~~~python
    method = build(Config(method='niw-ncc', dataset='omniglot', ways=20))
    ~~~
    """
    config = complete(config)
    torch.manual_seed(config.seed)
    return METHODS[config.method].build(config)
