"""An episode's labels as columns: whatever integers they are, in their sorted order."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number


@dataclass(frozen=True)
class Labels:
    """
    **Description**

    The classes of a support set, and who belongs to which. Every shape follows from those of the labels
    and from the number of ways, so that nothing but that number depends on the labels' values.

    **Arguments**

    * **classes** (Tensor) - The labels in sorted order, (..., ways).
    * **present** (Tensor) - Which columns stand for a class: in a batch of episodes with unequal ways,
        the smaller ones leave columns empty. (..., ways).
    * **onehot** (Tensor) - The support's classes as booleans, (..., n, ways).
    * **checked** (bool) - Whether labels may be looked at, to raise where they are wrong.
    """

    classes: Tensor
    present: Tensor
    onehot: Tensor
    checked: bool

    @property
    def ways(self) -> int:
        """The number of columns."""
        return self.classes.shape[-1]

    def match(self, y: Tensor) -> Tensor:
        """The columns of a query's labels as booleans, (..., ways). A label that the support lacks raises."""
        found = (y.unsqueeze(-1) == self.classes.unsqueeze(-2)) & self.present.unsqueeze(-2)
        if self.checked and not found.any(-1).all():
            first = tuple((~found.any(-1)).nonzero()[0].tolist())
            episode = first[y.dim() - self.classes.dim() : -1]  # without sample dimensions
            known = self.classes[episode][self.present[episode]].tolist()
            where = f" of episode {', '.join(map(str, episode))}" if episode else ""
            raise ArgumentError(
                f"query_y: label {y[first].item()} is not among the support's classes {known}{where}. "
                "A query can only be of a class that support_y holds."
            )
        return found


def encode(y: Tensor, ways: Optional[int] = None) -> Labels:
    """
    **Description**

    Columns for a support set's labels, which need not be 0 to ways - 1. With `ways` given no value of a
    label is looked at, as `torch.func.vmap` over episodes requires; more classes than that then make
    predictions nan, and a query label that the support lacks makes the loss infinite or nan.

    **Arguments**

    * **y** (Tensor) - The support's labels, (..., n).
    * **ways** (int, *optional*, default=None) - The number of classes; counted if not given.
    """
    if ways is not None:
        check_number("ways", ways, 1, whole=True)
    y = y.long()
    ordered = y.sort(-1).values
    first = torch.cat([torch.ones_like(ordered[..., :1], dtype=torch.bool), ordered[..., 1:] != ordered[..., :-1]], -1)
    column = first.cumsum(-1) - 1
    checked = ways is None
    ways = int(column.max()) + 1 if ways is None else ways
    starts = first.unsqueeze(-2) & (column.unsqueeze(-2) == torch.arange(ways, device=y.device).unsqueeze(-1))
    classes, present = (starts * ordered.unsqueeze(-2)).sum(-1), starts.any(-1)
    onehot = (y.unsqueeze(-1) == classes.unsqueeze(-2)) & present.unsqueeze(-2)
    return Labels(classes, present, onehot, checked)
