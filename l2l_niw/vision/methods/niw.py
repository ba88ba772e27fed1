"""NIW: the swap of MAML's constructor, the last layer's full posterior, and heads whose last block is random."""

from typing import Any, Callable, Dict

from torch import nn

from l2l_niw.algorithms import NIW
from l2l_niw.heads import LeaveOneOut
from l2l_niw.heads.episodic import EpisodicModel
from l2l_niw.models import add_adapters
from l2l_niw.vision.backbone import make_backbone
from l2l_niw.vision.config import Config
from l2l_niw.vision.loops import Episodic, GradientBased, LatentEpisodic, Method
from l2l_niw.vision.methods.gradient import linear_head
from l2l_niw.vision.methods.heads import feat, protonet, qda, ridge
from l2l_niw.vision.methods.spec import Spec

RANK, ADAPTERS = 8, 4  # directions, and rank of adapters
AS_PRINTED: Dict[str, Any] = {  # what is not the paper's, or its authors' for a transformer, by default
    "inference": "closed_form",
    "average_iterates": True,
    "precision_bounds": (1e-4, 1e3),
    "kl_weight": 1.0,
    "learn_step_sizes": False,
}


def swap(body: nn.Module, linear: nn.Module, config: Config) -> Method:
    """NIW in the place of MAML."""
    algorithm = NIW(nn.Sequential(body, linear), config.inner_lr, temperature=config.temperature)  # type: ignore
    return GradientBased(algorithm, config.steps, config.samples)  # type: ignore[arg-type]


def full(body: nn.Module, linear: nn.Module, config: Config) -> Method:
    """
    NIW with the full covariance of the last layer's posterior at T = 1; the body is shared by all tasks. The support's
    evidence says nothing of new classes, and is left out.
    """
    options: Dict[str, Any] = {"temperature": config.temperature, "prior_std": config.prior_std, "random": "last_layer"}
    algorithm = NIW(nn.Sequential(body, linear), lr=1.0, curvature="full", kl_weight=0.0, **options)
    return GradientBased(algorithm, config.steps)  # type: ignore[arg-type]


def episodic(make: Callable, config: Config) -> EpisodicModel:
    """A backbone and a head. With two shots or more, inner steps predict each support image from the others."""
    body = make_backbone(config)
    own = make(body.features)
    return EpisodicModel(body, own if config.shots == 1 else LeaveOneOut(own))


def last_block(model: EpisodicModel) -> str:
    """The pattern of the names of the backbone's last block."""
    return f"backbone.{model.backbone.last}"


def head(make: Callable, components: int = 1, **fixed: Any) -> Callable[[Config], Method]:
    """
    A builder of a head under NIW, with some of its options fixed: the backbone's last block is random, the rest is
    shared by all tasks.
    """

    def made(config: Config) -> Method:
        options = {"temperature": config.temperature, "prior_precision": config.prior_std**-2, **fixed}  # type: ignore
        models = [episodic(make, config) for _ in range(components)]
        model: Any = models[0] if components == 1 else models
        niw = NIW(model, config.inner_lr, second_order="none", random=last_block(models[0]), **options)  # type: ignore
        return Episodic(niw, config.steps, config.samples, config.sharpen)  # type: ignore[arg-type]

    return made


def ranked(make: Callable) -> Callable[[Config], Method]:
    """A builder of a head whose last block differs between tasks along a few learned directions."""

    def made(config: Config) -> Method:
        options: Dict[str, Any] = {"temperature": config.temperature, "prior_std": config.prior_std}
        model = episodic(make, config)
        niw = NIW(model, lr=1.0, rank=RANK, random=last_block(model), kl_weight=0.0, **options)
        return LatentEpisodic(niw, config.steps, config.samples)  # type: ignore[arg-type]

    return made


def with_adapters(make: Callable) -> Callable[[Config], Method]:
    """A builder of a head under NIW whose tasks differ by low-rank adapters of the backbone; all else is shared."""

    def made(config: Config) -> Method:
        options: Dict[str, Any] = {"temperature": config.temperature, "prior_precision": config.prior_std**-2}  # type: ignore
        model = episodic(make, config)
        add_adapters(model.backbone, ADAPTERS, freeze=False)
        niw = NIW(model, config.inner_lr, second_order="none", random="*lora_*", **options)  # type: ignore[arg-type]
        return Episodic(niw, config.steps, config.samples)  # type: ignore[arg-type]

    return made


HEAD: Dict[str, Any] = {"inner_lr": 0.01, "steps": 3, "temperature": 1e-4, "prior_std": 0.05, "samples": 10}
RANKED: Dict[str, Any] = {"steps": 2, "temperature": 1.0, "prior_std": 0.1, "samples": 10}
WITH_NIW: Dict[str, Spec] = {
    "niw": Spec(
        "NIW, linear",
        linear_head(swap),
        inner_lr=0.03,
        steps=5,
        temperature=1e-4,
        samples=5,
        baseline="maml",
    ),
    "niw-full": Spec(
        "NIW, linear, full A", linear_head(full), steps=3, temperature=1.0, prior_std=20.0, baseline="maml"
    ),
    "niw-ncc": Spec("NIW, nearest centroid", head(protonet), **HEAD, baseline="protonet"),
    "niw-ridge": Spec("NIW, ridge", head(ridge), **HEAD, baseline="ridge"),
    "niw-feat": Spec("NIW, FEAT", head(feat), **HEAD, baseline="feat"),
    "niw-qda": Spec("NIW, MetaQDA", head(qda), **HEAD, baseline="metaqda"),
    "niw-ncc-lora": Spec(
        "NIW, nearest centroid, adapters", with_adapters(protonet), **HEAD, baseline="protonet", of_transformers=True
    ),
    "niw-ncc-paper": Spec(
        "NIW, nearest centroid, the paper's settings",
        head(protonet, **AS_PRINTED),
        inner_lr=1e-4,
        steps=3,
        temperature=1.0,
        prior_std=1e-3,
        samples=2,
        baseline="protonet",
        settings_of="protonet",
    ),
    "niw-ncc-rank": Spec("NIW, nearest centroid, rank 8", ranked(protonet), **RANKED, baseline="protonet"),
    "niw-qda-rank": Spec("NIW, MetaQDA, rank 8", ranked(qda), **RANKED, baseline="metaqda"),
}
