"""What is looked at before a call changes anything."""

import math
import operator
from typing import List, Optional, Sequence

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError, LossError
from l2l_niw.weights import Layout
from l2l_niw.wishart import lower_bound


def check_number(name: str, value: object, low: float, strict: bool = False, whole: bool = False) -> None:
    """Raises unless `value` is a finite number, at least `low`, or above it if `strict`."""
    domain = f"a {'whole' if whole else 'finite'} number {'above' if strict else 'of at least'} {low:g}"
    try:
        inside = low < value if strict else low <= value
        right = math.isfinite(value) and inside and (not whole or operator.index(value) == value)
    except TypeError:
        right = False
    if not right:
        raise ArgumentError(f"{name} must be {domain}, got {value!r}.")


def check_count(n: Optional[int]) -> None:
    if n is not None:
        check_number("n, the number of data behind the loss,", n, 1, whole=True)


def at_hand(tensor: Tensor) -> bool:
    """Whether a look at the value waits for no device. Where it does, checks are put off until the chain is used."""
    return tensor.device.type == "cpu"


def check_degrees(raw_n0: Tensor, wishart: str, d: int) -> None:
    raw = raw_n0.item()
    bound = lower_bound(wishart, d)
    n0 = bound + math.exp(raw) if raw < 700.0 else math.inf
    if not bound < n0 < math.inf:
        raise ArgumentError(
            f"raw_n0 has come to {raw}, where n_0 = {n0} leaves its domain. Lower its learning rate, or load a sound "
            "state dict."
        )


def check_sound(sound: Tensor) -> None:
    """The check that was put off: whether the chain's losses and steps were all finite."""
    if not sound.item():
        raise LossError(
            "adapt: a loss or the result of a step was not finite. An empty support set gives nan; else lower the "
            "inner lr or the temperature, or check the inputs."
        )


def check_frozen(layout: Layout, allow_nograd: bool) -> None:
    if layout.frozen and not allow_nograd:
        raise ArgumentError(
            f"adapt: parameter '{layout.frozen[0]}' has requires_grad=False. Pass allow_nograd=True to NIW or to adapt "
            "to keep frozen parameters as they are."
        )


def check_loss(loss: Tensor, what: str = "adapt: the loss", look: bool = True) -> None:
    """Whether a loss can be stepped on. A step looks at its value later, with its own."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise LossError(f"{what} must be a scalar tensor; average it over the support first.")
    if not loss.requires_grad:
        raise LossError(
            f"{what} has no graph. Compute it from this learner's outputs, outside of no_grad and inference_mode."
        )
    if look and at_hand(loss):
        check_finite(loss, what)


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


def check_used(names: List[str], used: Sequence[bool], allow_unused: bool) -> None:
    unused = [name for name, is_used in zip(names, used) if not is_used]
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


def check_step(layout: Layout, loss: Tensor, gradient: Tensor, theta: Tensor) -> None:
    """One look at the whole step; only one that failed is searched for what to blame."""
    if math.isfinite((theta.sum() + loss).item()):
        return
    check_finite(loss, "adapt: the loss")
    blame = "the step's result"
    for name, part in layout.named(gradient, cast=False).items():
        if not torch.isfinite(part).all():
            blame = f"the gradient of parameter '{name}'"
            break
    raise LossError(f"adapt: {blame} is not finite. Lower lr or the temperature, or check the inputs.")
