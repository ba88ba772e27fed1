"""What q(phi) has beside m_0, as trained parameters."""

import math
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from l2l_niw.algorithms.options import LARGEST, SMALLEST, Options
from l2l_niw.errors import ArgumentError
from l2l_niw.inference.chain import noise_variance
from l2l_niw.inference.latent import DIRECTIONS, Latent
from l2l_niw.utils._checks import check_number

Named = Sequence[Tuple[str, nn.Parameter]]
PRIOR_STD = {True: 0.1, False: 0.3}  # of the weights' scale: of each direction, or of the weights, at the start


def wide(p: Tensor) -> torch.dtype:
    """The type of what is learned beside a weight: float32 at least."""
    return torch.promote_types(p.dtype, torch.float32)


class Hyperparameters(nn.Module):
    """
    **Description**

    What q(phi) has beside m_0: `log_variance`, log(V_0 / n_0), one tensor per random parameter of the model, and
    `raw_n0`, behind n_0.

    **Arguments**

    * **parameters** (list) - The model's random ones.
    * **log_variance** (float) - log(V_0 / n_0) at the start.
    * **wishart** (str) - The reading of the Inverse-Wishart.
    """

    initial_log_variance: Tensor
    full_wishart: Tensor

    def __init__(self, parameters: Sequence[Tensor], log_variance: float, wishart: str):
        super().__init__()
        self.size = sum(p.numel() for p in parameters if p.requires_grad)  # of n_0's domain
        self.log_variance = nn.ParameterList(
            nn.Parameter(torch.full_like(p, log_variance, dtype=wide(p)), requires_grad=p.requires_grad)
            for p in parameters
        )
        dtype, device = self.log_variance[0].dtype, parameters[0].device
        self.raw_n0 = nn.Parameter(torch.tensor(0.0, dtype=dtype, device=device))
        self.register_buffer("initial_log_variance", torch.tensor(log_variance, dtype=dtype, device=device))
        self.register_buffer("full_wishart", torch.tensor(wishart == "full", device=device))

    def spreads(self) -> List[Tuple[Tensor, ...]]:
        """What the variance of each random parameter is made of."""
        return [(v,) for v in self.log_variance]

    @torch.no_grad()
    def scale_std(self, factor: float) -> None:
        """Multiplies the standard deviations between tasks."""
        for log_variance in (*self.log_variance, self.initial_log_variance):
            log_variance.add_(2.0 * math.log(factor))


class LatentHyperparameters(nn.Module):
    """
    **Description**

    What q(phi) has beside m_0 where the posterior has its full covariance: `directions`, U, or `log_variance`,
    log(V_0 / n_0), of the diagonal; `raw_n0`, behind n_0; and `log_noise`, of targets around outputs that are means.

    **Arguments**

    * **named** (list) - Names and random parameters of the model.
    * **rank** (int) - Directions, or 0 for the diagonal.
    * **directions** (str) - 'joint', 'by_layer' or 'adapters', as in `NIW`.
    * **prior_std** (float) - Standard deviation of a direction, relative to the weights' scale.
    * **noise** (float) - Standard deviation of the noise at the start.
    * **wishart** (str) - The reading of the Inverse-Wishart.
    """

    full_wishart: Tensor

    def __init__(self, named: Named, rank: int, directions: str, prior_std: float, noise: float, wishart: str):
        super().__init__()
        if directions not in DIRECTIONS:
            raise ArgumentError(f"directions must be one of {DIRECTIONS}, got {directions!r}.")
        self.rank = rank
        self.directions, self.columns, self.log_variance = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        layers: List[str] = []
        self.places: List[Tuple[int, int]] = []
        self._two: List[bool] = []  # whether a weight's directions are outer products
        for name, p in named:
            std = prior_std * scale_of(name, p, named)
            if not rank:
                own = torch.full_like(p, 2.0 * math.log(std), dtype=wide(p))
                self.log_variance.append(nn.Parameter(own, requires_grad=p.requires_grad))
                begin = self.places[-1][1] if self.places else 0
                self.places.append((begin, begin + p.numel()))
                continue
            layer = "" if directions == "joint" else name.rpartition(".")[0]
            layers += [] if layer in layers else [layer]
            self.places.append((rank * layers.index(layer), rank * (layers.index(layer) + 1)))
            shapes: List[Tuple[int, ...]] = [(rank, *p.shape)]
            if directions == "adapters" and p.dim() > 1:
                shapes = [(len(p), rank), (rank, p[0].numel())]
            self._two.append(len(shapes) == 2)
            for shape, parameters in zip(shapes, (self.directions, self.columns)):
                drawn = std ** (1.0 / len(shapes)) * torch.randn(shape, dtype=wide(p), device=p.device)
                parameters.append(nn.Parameter(drawn, requires_grad=p.requires_grad))
        trained = [place for place, (_, p) in zip(self.places, named) if p.requires_grad]
        self.size = max(end for _, end in close_up(trained or self.places))  # the number of coordinates
        first = named[0][1].detach()
        zero = first.new_zeros((), dtype=wide(first))
        self.raw_n0 = nn.Parameter(zero)
        self.log_noise = nn.Parameter(zero + math.log(noise))
        self.register_buffer("full_wishart", torch.tensor(wishart == "full", device=first.device))

    def spreads(self) -> List[Tuple[Tensor, ...]]:
        """What the variance of each random parameter is made of."""
        if not self.rank:
            return [(v,) for v in self.log_variance]
        columns = iter(self.columns)
        return [(u, next(columns)) if two else (u,) for u, two in zip(self.directions, self._two)]

    @torch.no_grad()
    def scale_std(self, factor: float) -> None:
        """Multiplies the standard deviations between tasks."""
        for log_variance in self.log_variance:
            log_variance.add_(2.0 * math.log(factor))
        for direction in self.directions:
            direction.mul_(factor)

    def latent(self, names: Sequence[str], m0: List[Tensor], which: Sequence[int], wishart: str) -> Latent:
        """L_0 of some of the random parameters, in z."""
        spreads = self.spreads()
        places = close_up([self.places[i] for i in which])
        return Latent(names, m0, [spreads[i] for i in which], places, self.raw_n0, self.log_noise, wishart)


def close_up(places: Sequence[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """The same places without the gaps that those of frozen parameters leave."""
    begin, found = 0, {}
    for place in sorted(set(places)):
        found[place] = (begin, begin + place[1] - place[0])
        begin = found[place][1]
    return [found[place] for place in places]


@torch.no_grad()
def scale_of(name: str, p: Tensor, named: Named) -> float:
    """The root mean square of a weight; of a bias that of its layer's weight, if it is larger; 0.1 where all are 0."""
    weight = dict(named).get(f"{name.rpartition('.')[0]}.weight".lstrip("."), p)
    tensors = [p] if p.dim() > 1 else [p, weight]
    return max(t.float().square().mean().sqrt().item() for t in tensors) or 0.1


def chain_hyper(
    chosen: Named, prior_precision: Optional[float], prior_std: Optional[float], lr: float, options: Options
) -> Hyperparameters:
    """What a chain's q(phi) has beside m_0."""
    if prior_std is not None:
        raise ArgumentError("prior_std goes with rank or curvature='full'. Give prior_precision, P_0 at the start.")
    if prior_precision is None:
        prior_precision = 0.01 / noise_variance(lr, options.temperature, n=1) if options.temperature else 1.0
    check_number("prior_precision", prior_precision, SMALLEST, high=LARGEST)
    return Hyperparameters([p for _, p in chosen], -math.log(prior_precision), options.wishart)


def latent_hyper(
    chosen: Named,
    rank: int,
    directions: str,
    prior_std: Optional[float],
    prior_precision: Optional[float],
    noise: float,
    wishart: str,
) -> LatentHyperparameters:
    """The same in the coordinates of Gauss-Newton steps."""
    if prior_precision is not None:
        raise ArgumentError(
            "prior_precision is a chain's. With rank or curvature='full' give prior_std, relative to the weights'."
        )
    prior_std = PRIOR_STD[rank > 0] if prior_std is None else prior_std
    check_number("prior_std", prior_std, 0, strict=True, high=LARGEST)
    check_number("noise", noise, 0, strict=True, high=LARGEST)
    return LatentHyperparameters(chosen, rank, directions, prior_std, noise, wishart)
