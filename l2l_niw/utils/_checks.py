"""What is looked at before a call changes anything."""

import math
import operator
from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError, LossError


def check_number(
    name: str,
    value: Any,
    low: float,
    strict: bool = False,
    whole: bool = False,
    high: float = math.inf,
    or_zero: bool = False,
) -> None:
    """Raises unless `value` is a finite number, at least `low`, or above it if `strict`, and not above `high`."""
    domain = f"{'0 or ' if or_zero else ''}a {'whole' if whole else 'finite'} number "
    shown = str if whole else "{:g}".format
    domain += f"{'above' if strict else 'of at least'} {shown(low)}"
    if high < math.inf:
        domain += f" and at most {shown(high)}"
    try:
        inside = (low < value if strict else low <= value) and value <= high
        right = math.isfinite(value) and inside and (not whole or operator.index(value) == value)
    except (TypeError, OverflowError):  # a whole number that no float can hold
        right = False
    if not right:
        raise ArgumentError(f"{name} must be {domain}, got {value!r}.")


def check_seed(seed: Any) -> None:
    """Both torch and numpy take seeds of 63 bits."""
    check_number("seed", seed, 0, whole=True, high=2**63 - 1)


def check_count(n: Optional[int]) -> None:
    if n is not None:
        check_number("n, the number of examples behind the loss,", n, 1, whole=True)


def check_loss(loss: Tensor, what: str = "adapt: the loss") -> None:
    """Whether a loss can be stepped on."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise LossError(f"{what} must be a scalar tensor; average it over the support first.")
    if not loss.requires_grad:
        raise LossError(
            f"{what} has no graph. Compute it from this learner's outputs, outside of no_grad and inference_mode."
        )


def check_finite(losses: Tensor, what: str) -> None:
    """Raises if a loss, or one of several episodes', is not a finite number."""
    if math.isfinite((losses.sum() if losses.dim() else losses).item()):
        return
    for i, value in enumerate(losses.reshape(-1).tolist()):
        if not math.isfinite(value):
            where = f" of episode {i}" if losses.dim() else ""
            raise LossError(
                f"{what}{where} is {value}. An empty support set gives nan; else lower the inner lr or the temperature."
            )


def check_used(names: Sequence[str], gradients: Sequence[Optional[Tensor]], allow_unused: bool) -> None:
    unused = [name for name, g in zip(names, gradients) if g is None]
    if len(unused) == len(names):
        raise LossError(
            "adapt: the loss does not depend on this learner's weights. Compute it from this learner's "
            "outputs, `learner(x)`, after its last adapt."
        )
    if unused and not allow_unused:
        raise LossError(
            f"adapt: the loss does not depend on parameter '{unused[0]}' ({len(unused)} in all). Pass "
            "allow_unused=True to NIW or to adapt to leave such parameters alone."
        )


@torch.no_grad()
def check_step(names: Sequence[str], loss: Tensor, gradients: Sequence[Optional[Tensor]]) -> None:
    """One look at all gradients; only those that failed are searched for what to blame."""
    if math.isfinite(loss.item() + sum([g.sum().item() for g in gradients if g is not None])):
        return
    check_finite(loss.detach(), "adapt: the loss")
    blame = [name for name, g in zip(names, gradients) if g is not None and not torch.isfinite(g).all()]
    if blame:  # else it was the sum that left its domain
        raise LossError(
            f"adapt: the gradient of parameter '{blame[0]}' is not finite. Lower lr or the temperature, or check the "
            "inputs."
        )
