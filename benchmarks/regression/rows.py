"""The rows of the table, and the settings that are searched for each: four of them, on validation tasks."""

from dataclasses import dataclass
from itertools import product
from typing import Callable, Optional

from regression.base import NeuralProcess, Plain
from regression.bmaml import BMAML
from regression.ensemble import Ensemble
from regression.maml import MAML, Reptile
from regression.niw import MixtureMethod, NIWMethod, NIWProcess, RankMethod, RankProcess
from regression.pmaml import PMAML
from regression.vampire import VAMPIRE

OUTER = (0.004, 0.001, 0.002, 0.008)  # learning rates of what has no inner one
TWO = (0.004, 0.0015)  # of what has one
FAST = (0.004, 0.008)  # of what has one and a head that likes the higher one
BAYES = "bayes"  # the optimal predictor: nothing to train, so it is no row of `ROWS`


@dataclass(frozen=True)
class Row:
    """
    **Arguments**

    * **title** (str) - As it stands in the table.
    * **build** (callable) - From settings to a method.
    * **inner** (tuple) - Inner learning rates to search, if it has them, two.
    * **baseline** (str, *optional*, default=None) - The row with the same head and without NIW.
    * **outer** (tuple, *optional*, default=TWO) - Outer learning rates to search beside inner ones.
    * **searched** (str, *optional*, default='lr') - What the inner ones are.
    """

    title: str
    build: Callable
    inner: tuple = ()
    baseline: Optional[str] = None
    outer: tuple = TWO
    searched: str = "lr"

    @property
    def space(self):
        """Four settings, whatever the method; the first is what is used before any search."""
        if not self.inner:
            return [{"outer_lr": outer} for outer in OUTER]
        return [{"outer_lr": outer, self.searched: inner} for outer, inner in product(self.outer, self.inner)]


STEPS = (0.01, 0.003)
LARGE_STEPS = (0.03, 0.1)  # of a network whose inputs are scaled
SMALL_STEPS = (0.003, 0.001)
SGLD = {"curvature": "sgld", "temperature": 1e-7}
GGN = {"curvature": "ggn", "temperature": 1e-6, "prior_precision": 1e3}  # of the size of the curvature it meets


def niw_row(head, title, make, inner, steps, outer=TWO, chosen=SGLD):
    """NIW with a head, by one of the curvatures."""
    return Row(f"NIW, {title}", lambda **options: make(head, steps, **chosen, **options), inner, head, outer)


def niw_rows(head, title, make, inner, steps, outer=TWO):
    """By both."""
    return {
        f"niw-{head}": niw_row(head, title, make, inner, steps, outer),
        f"niw-{head}-ggn": niw_row(head, f"{title}, ggn", make, inner, steps, outer, GGN),
    }


EVIDENCE = (3.0, 1.0)  # the weight of the support's evidence beside the query's likelihood


def rank_row(head, title, make, steps, outer=TWO, inner=EVIDENCE, **chosen):
    """NIW with the full covariance of the posterior."""
    build = lambda **options: make(head, steps, **chosen, **options)  # noqa: E731
    return Row(f"NIW, {title}", build, inner, "maml-plain-5" if head == "plain" else head, outer, "kl_weight")


def mixture_row(head, title, baseline, inner, components, searched="lr", **chosen):
    """A mixture of NIWs."""
    build = lambda **options: MixtureMethod(head, components, **chosen, **options)  # noqa: E731
    return Row(f"NIW, {title}, {components} components", build, inner, baseline, TWO, searched)


ROWS = {
    "ridge": Row("RidgeNet", lambda: Plain("ridge")),
    "bayesian-ridge": Row("Bayesian ridge", lambda: Plain("bayesian-ridge")),
    "ridge-mixture": Row("ridge mixture", lambda: Plain("ridge-mixture")),
    "cnp": Row("CNP", lambda: NeuralProcess("cnp")),
    "anp": Row("ANP", lambda: NeuralProcess("anp")),
    "maml-1": Row("MAML, 1 step", lambda lr, **options: MAML("linear", 1, lr, **options), STEPS),
    "maml-5": Row("MAML, 5 steps", lambda lr: MAML("linear", 5, lr), SMALL_STEPS),
    "maml-plain-1": Row("MAML, plain, 1 step", lambda lr, **options: MAML("plain", 1, lr, **options), LARGE_STEPS),
    "maml-plain-5": Row("MAML, plain, 5 steps", lambda lr, **options: MAML("plain", 5, lr, **options), LARGE_STEPS),
    "niw-plain-rank": rank_row("plain", "plain, rank 8", RankMethod, 3, rank=8),
    "niw-bayesian-ridge-rank": rank_row("bayesian-ridge", "Bayesian ridge, rank 8", RankMethod, 3, rank=8),
    "niw-anp-rank": rank_row("anp", "ANP, rank 8", RankProcess, 2, FAST, rank=8),
    "niw-plain-mixture": mixture_row("plain", "plain, rank 8", "maml-plain-5", (1.0, 3.0), 2, "kl_weight", rank=8),
    "niw-bayesian-ridge-mixture": mixture_row(
        "bayesian-ridge", "Bayesian ridge", "bayesian-ridge", (1e-4, 1e-3), 2, steps=1, temperature=1e-7
    ),
    "reptile": Row("Reptile", lambda lr: Reptile("linear", 5, lr), SMALL_STEPS),
    "pmaml": Row("PMAML", lambda lr: PMAML("linear", 5, lr), SMALL_STEPS),
    "vampire": Row("VAMPIRE", lambda lr: VAMPIRE("linear", 5, lr), SMALL_STEPS),
    "bmaml": Row("BMAML", lambda lr: BMAML("linear", 5, lr), STEPS),
    "bmaml-plain": Row("BMAML, plain", lambda lr: BMAML("plain", 5, lr), LARGE_STEPS, "maml-plain-5"),
    "ensemble-bayesian-ridge-4": Row(
        "four Bayesian ridges", lambda: Ensemble(lambda: Plain("bayesian-ridge"), 4), baseline="bayesian-ridge"
    ),
    "maml-ridge-1": Row("MAML, ridge, 1 step", lambda lr: MAML("ridge", 1, lr), SMALL_STEPS, "ridge"),
    "maml-ridge-5": Row("MAML, ridge, 5 steps", lambda lr: MAML("ridge", 5, lr), SMALL_STEPS, "ridge"),
    "meta-sgd-ridge-5": Row("Meta-SGD, ridge, 5 steps", lambda lr: MAML("ridge", 5, lr, True), SMALL_STEPS, "ridge"),
    **niw_rows("ridge", "ridge", NIWMethod, SMALL_STEPS, 5),
    **niw_rows("bayesian-ridge", "Bayesian ridge", NIWMethod, SMALL_STEPS, 5),
    "niw-ridge-mixture": niw_row("ridge-mixture", "ridge mixture", NIWMethod, (1e-4, 1e-5), 1, FAST),
    **niw_rows("cnp", "CNP", NIWProcess, (0.003, 0.001), 3),
    **niw_rows("anp", "ANP", NIWProcess, (0.003, 0.001), 3, FAST),
}
TITLES = {BAYES: "Bayes-optimal", **{name: row.title for name, row in ROWS.items()}}
BASELINES = {BAYES: None, **{name: row.baseline for name, row in ROWS.items()}}
