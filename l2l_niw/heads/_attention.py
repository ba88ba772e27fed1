"""Multi-head attention in plain matrix products: second derivatives and `vmap` work, as fused kernels' do not."""

import math
from typing import Optional

from torch import Tensor, nn

from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """softmax(query key^T / sqrt(d)) value; `mask` says which keys a query sees, (..., m, n) or (..., 1, n)."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ value


class MultiHeadAttention(nn.Module):
    """
    **Description**

    Attention on `heads` parts of the width side by side, between learned projections.

    **Arguments**

    * **width** (int) - Width of queries, keys, values and outputs.
    * **heads** (int, *optional*, default=1) - Parts; divides the width.
    """

    def __init__(self, width: int, heads: int = 1):
        super().__init__()
        check_number("heads", heads, 1, whole=True)
        if width % heads:
            raise ArgumentError(f"heads must divide the width {width}, got {heads}.")
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        query, key, value = self._part(self.query(query)), self._part(self.key(key)), self._part(self.value(value))
        mixed = attend(query, key, value, None if mask is None else mask.unsqueeze(-3))
        return self.out(mixed.transpose(-3, -2).flatten(-2))

    def _part(self, x: Tensor) -> Tensor:
        """(..., n, width) to (..., heads, n, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)


class Block(nn.Module):
    """
    **Description**

    A transformer's layer: attention and a perceptron, each behind a LayerNorm and beside a shortcut.

    **Arguments**

    * **width** (int) - Width of the tokens.
    * **heads** (int) - Heads of the attention.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = MultiHeadAttention(width, heads)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, context: Optional[Tensor] = None) -> Tensor:
        """Attends to the context's tokens, or to its own."""
        tokens = self.before(x if context is None else context)
        x = x + self.attention(self.before(x), tokens, tokens)
        return x + self.perceptron(self.between(x))
