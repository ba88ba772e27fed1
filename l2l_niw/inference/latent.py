"""L_0 in coordinates in which a task's weights are N(0, I): directions that tasks differ along, or all weights.

theta = m_0 + U z, z ~ N(0, I). With `rank` directions U is learned, and V_0 / n_0 = U U^T; with the paper's diagonal
V_0, U is the diagonal of its square root. Everything else, the Wishart's part included, is the same in z as it is in
theta, in as many dimensions as z has.
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from l2l_niw.inference.wishart import from_raw, log_determinant_gap, mode_ratio
from l2l_niw.utils._functional import SMALL

DIRECTIONS = ("joint", "by_layer", "adapters")


class Latent(NamedTuple):
    """
    **Description**

    L_0 of the random weights as an episode sees it.

    * `names`, `m0` - The weights' names, and their means.
    * `directions` - For each weight what U is made of: one tensor, (r, *shape), of r directions; two, (rows, r) and
        (r, columns), whose outer products are the directions of a matrix; or one of the weight's own shape,
        log(V_0 / n_0), of the diagonal.
    * `places` - For each weight where its coordinates begin and end.
    * `raw_n0`, `log_noise` - The scalars behind n_0 and the noise of targets around outputs that are means.
    * `wishart` - 'factorised' or 'full'.
    * `matrix` - All of U, (r, weights), where every weight has the same coordinates and U is small; else None.
    """

    names: Sequence[str]
    m0: List[Tensor]
    directions: List[Tuple[Tensor, ...]]
    places: Sequence[Tuple[int, int]]
    raw_n0: Tensor
    log_noise: Tensor
    wishart: str
    matrix: Optional[Tensor] = None

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return max(end for _, end in self.places)

    @property
    def n0(self) -> Tensor:
        """n_0, within its domain whatever the unconstrained scalar."""
        return from_raw(self.raw_n0, self.wishart, self.size)

    def noise(self) -> Tensor:
        """The standard deviation of targets around outputs that are means."""
        return self.log_noise.exp()

    def gap(self) -> Tensor:
        """What not knowing Sigma costs in an episode's expected KL."""
        return 0.5 * log_determinant_gap(self.n0, self.size, self.wishart).to(self.log_noise.dtype)

    def zeros(self) -> Tensor:
        """The coordinates of m_0."""
        return torch.zeros(self.size, dtype=self.log_noise.dtype, device=self.log_noise.device)

    def leaves(self) -> List[Tensor]:
        """Everything that L_0 is made of."""
        return [*self.m0, *[t for own in self.directions for t in own], self.raw_n0, self.log_noise]

    def offsets(self, z: Tensor) -> List[Tensor]:
        """U z, one tensor per weight, of coordinates (..., size)."""
        if self.matrix is not None:
            parts = (z @ self.matrix).split([m.numel() for m in self.m0], -1)
            return [part.reshape(z.shape[:-1] + m.shape) for part, m in zip(parts, self.m0)]
        found = []
        for m, own, (begin, end) in zip(self.m0, self.directions, self.places):
            part = z[..., begin:end]
            if len(own) == 2:
                found.append(((own[0] * part.unsqueeze(-2)) @ own[1]).reshape(z.shape[:-1] + m.shape))
            elif own[0].shape == m.shape:
                found.append(part.reshape(z.shape[:-1] + m.shape) * (0.5 * own[0]).exp())
            else:
                found.append(torch.tensordot(part, own[0], 1))
        return found

    def weights(self, z: Tensor) -> List[Tensor]:
        """theta = m_0 + U z."""
        return [m + offset.to(m.dtype) for m, offset in zip(self.m0, self.offsets(z))]

    def at_mode(self) -> "Latent":
        """The same of the mode phi* of q(phi) (Eq. 17), whose covariance is that of V_0 / n_0 times a number."""
        ratio = mode_ratio(self.n0, self.wishart, self.size).to(self.log_noise.dtype)
        directions: List[Tuple[Tensor, ...]] = []
        for m, own in zip(self.m0, self.directions):
            diagonal = len(own) == 1 and own[0].shape == m.shape
            directions.append((own[0] + ratio.log() if diagonal else own[0] * ratio.sqrt(), *own[1:]))
        return self._replace(directions=directions, matrix=None)

    def detached(self) -> "Latent":
        """The same without a graph."""
        return self._replace(
            m0=[m.detach() for m in self.m0],
            directions=[tuple(t.detach() for t in own) for own in self.directions],
            raw_n0=self.raw_n0.detach(),
            log_noise=self.log_noise.detach(),
            matrix=None if self.matrix is None else self.matrix.detach(),
        )

    def copied(self) -> "Latent":
        """
        The same, with a graph, unless it is large: what is written to the parameters later does not change it.
        """
        if sum(t.numel() for t in self.leaves()) > SMALL:
            return self
        directions, matrix = [tuple(t.clone() for t in own) for own in self.directions], None
        joint = all([len(own) == 1 and own[0].dim() > m.dim() for own, m in zip(directions, self.m0)])
        if joint and all([place == (0, self.size) for place in self.places]):
            matrix = torch.cat([own[0].reshape(self.size, -1) for own in directions], 1)
        return self._replace(
            m0=[m.clone() for m in self.m0],
            directions=directions,
            raw_n0=self.raw_n0.clone(),
            log_noise=self.log_noise.clone(),
            matrix=matrix,
        )
