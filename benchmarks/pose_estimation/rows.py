"""The rows of the table, and the settings that are searched: four for every method that is trained."""

from dataclasses import dataclass
from itertools import product
from typing import Callable, Optional, Sequence

from l2l_niw import NIW
from pose_estimation.limits import Constant, Nearest
from pose_estimation.methods import Adapted, Inferred, Plain, Ranked

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds

OUTER, TWO = (1e-3, 5e-4, 2e-3, 4e-3), (1e-3, 2e-3)  # learning rates
INNER = (1e-2, 1e-3)
STEPS = (0.01, 0.003)  # of a linear layer


@dataclass(frozen=True)
class Row:
    """
    A method of the table.

    * `build` - From a column, and settings but `lr`, to a method.
    * `space` - Settings that are searched; the first ones hold without a search. A method without is not trained.
    * `baseline` - The row with the same head and without NIW.
    """

    title: str
    build: Callable
    space: Sequence[dict] = tuple({"lr": lr} for lr in OUTER)
    baseline: Optional[str] = None


def two_by_two(name, values):
    return tuple({"lr": lr, name: value} for value, lr in product(values, TWO))


def maml(column, inner_lr):
    return Adapted(column, lambda model: l2l.algorithms.MAML(model, inner_lr, allow_unused=True))


def niw_for_maml(column, inner_lr):
    """The same line with NIW in it."""
    return Adapted(column, lambda model: NIW(model, inner_lr, allow_unused=True))


def with_and_without(name, title, head):
    """A head's two rows."""
    return {
        name: Row(title, lambda column: Plain(column, head)),
        f"niw-{name}": Row(
            f"NIW, {title}",
            lambda column, **options: Inferred(column, head, **options),
            two_by_two("inner_lr", INNER),
            name,
        ),
    }


def ranked(title, head, baseline):
    return Row(
        f"NIW, {title}, rank 8",
        lambda column, **options: Ranked(column, head, **options),
        two_by_two("kl_weight", (1.0, 3.0)),
        baseline,
    )


def all_random(column, inner_lr):
    return Inferred(column, "ridge", inner_lr, random="all")


def mixture(column, responsibilities):
    return Inferred(column, "ridge", INNER[0], components=2, responsibilities=responsibilities)


ROWS = {
    "constant": Row("the support's mean", lambda column: Constant(), ()),
    "nearest": Row("nearest view, in pixels", lambda column: Nearest(), ()),
    "maml": Row("MAML", maml, two_by_two("inner_lr", STEPS)),
    "niw-maml": Row("NIW in MAML's place", niw_for_maml, two_by_two("inner_lr", STEPS), "maml"),
    "niw-maml-rank": ranked("linear", "linear", "maml"),
    **with_and_without("cr", "C+R", "ridge"),
    "niw-cr-all": Row("NIW, C+R, all weights", all_random, two_by_two("inner_lr", (1e-3, 1e-4)), "cr"),
    "niw-cr-rank": ranked("C+R", "ridge", "cr"),
    "niw-cr-mixture": Row(
        "NIW, C+R, 2 components", mixture, two_by_two("responsibilities", ("evidence", "uniform")), "cr"
    ),
    **with_and_without("cnp-max", "CNP, max", "cnp-max"),
    **with_and_without("cnp-mean", "CNP, mean", "cnp-mean"),
    **with_and_without("cnp-ba", "CNP+BA", "cnp-ba"),
    **with_and_without("anp", "ANP", "anp"),
    **with_and_without("cnp-fcl", "CNP+FCL", "cnp-fcl"),
    **with_and_without("anp-fcl", "ANP+FCL", "anp-fcl"),
}
