"""Several pretrainings: mixtures of NIWs, and ensembles of the same networks without it."""

from typing import Callable, Dict

from l2l_niw.vision.config import Config
from l2l_niw.vision.loops import Ensemble, Method
from l2l_niw.vision.methods.heads import HEADS, qda
from l2l_niw.vision.methods.niw import HEAD, head
from l2l_niw.vision.methods.spec import Spec


def ensemble(member: Callable[[Config], Method], size: int) -> Callable[[Config], Method]:
    """A builder of several trainings whose probabilities are averaged."""
    return lambda config: Ensemble([member(config) for _ in range(size)])


SEVERAL: Dict[str, Spec] = {
    "metaqda-4": Spec(
        "MetaQDA, Bayesian, ensemble of 4", ensemble(HEADS["metaqda"].build, 4), components=4, settings_of="metaqda"
    ),
    "niw-qda-2": Spec(
        "NIW, MetaQDA, mixture of 2, trained on as many tasks as one",
        head(qda, 2),
        **{**HEAD, "samples": 20, "sharpen": 1.0},
        baseline="niw-qda",
        components=2,
        shares_tasks=True,
    ),
    "niw-qda-4": Spec(
        "NIW, MetaQDA, mixture of 4",
        head(qda, 4),
        **{**HEAD, "samples": 40, "sharpen": 1.0},
        baseline="metaqda-4",
        components=4,
    ),
}
