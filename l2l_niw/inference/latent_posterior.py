"""An episode's posterior in the prior's coordinates: its steps, its draws, its linearised predictions."""

from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution

from l2l_niw.errors import ArgumentError
from l2l_niw.heads.predictions import Gaussian
from l2l_niw.inference.gaussian import GaussianWeights, Weights, run_networks
from l2l_niw.inference.laplace import Spread, gauss_newton, jacobian, log_evidence, spread
from l2l_niw.inference.latent import Latent
from l2l_niw.inference.likelihood import Known, Outputs, energy, look, widened, without_graph

LARGEST = 2**27  # entries of a Jacobian: half a gigabyte


class Solution(NamedTuple):
    """
    **Description**

    What one Gauss-Newton step finds, of an episode or of several.

    * `z` - Where it leads, (..., coordinates).
    * `spread` - S, of the outputs linearised where it began.
    * `evidence` - The support's log evidence there, each episode's, in nats.
    * `unit` - The mean loss that is one nat per example, each episode's: 1 for a likelihood, 2 noise^2 for a squared
        error.
    * `constant` - What a nat of a squared error leaves out, per example: the noise's part.
    * `likelihood` - What the outputs parametrise.
    * `known` - What the loss has shown, for further steps of the same episode.
    """

    z: Tensor
    spread: Spread
    evidence: Tensor
    unit: Tensor
    constant: Tensor
    likelihood: str
    known: Tuple[Optional[Known], ...] = ()

    def detached(self) -> "Solution":
        """The same without a graph."""
        return Solution(
            self.z.detach(),
            self.spread.detached(),
            self.evidence.detach(),
            self.unit.detach(),
            self.constant,
            self.likelihood,
            self.known,
        )


def free_energy(solution: Solution, gap: Tensor) -> Tensor:
    """
    **Description**

    What an episode's objective has beside the query's loss, in units of that loss, summed over episodes: the support's
    free energy, E_q[l_i] + KL at its minimum, which is -log p(S) by Laplace's approximation, plus `gap`, what not
    knowing Sigma costs. With a query's predictive likelihood it makes the marginal likelihood of all data of a task.
    """
    return (solution.unit * (gap - solution.evidence)).sum()


def posterior_of(
    module: nn.Module, latent: Latent, solution: Solution, temperature: float, at_mode: bool = False
) -> "LatentWeights":
    """q_i after a step, with its support's free energy: under q(phi), or under its mode phi*, where Sigma is known."""
    found = LatentWeights(module, latent, solution.z, solution.spread, solution.likelihood)
    found.free_energy = temperature * ((0.0 if at_mode else latent.gap()) - solution.evidence)
    return found


def step(
    latent: Latent,
    z: Tensor,
    losses: Tensor,
    outputs: Sequence[Outputs],
    n: float,
    likelihood: str,
    temperature: float,
    radius: float,
    create_graph: bool,
    known: Tuple[Optional[Known], ...] = (),
) -> Solution:
    """
    **Description**

    One Gauss-Newton step on l_i(z) / T + |z|^2 / 2.

    **Arguments**

    * **latent** (Latent) - L_0.
    * **z** (Tensor) - What the losses were computed at, (..., coordinates).
    * **losses** (Tensor) - Mean losses over the support, (...).
    * **outputs** (list) - Of the forwards behind them.
    * **n** (float) - Examples of an episode.
    * **likelihood**, **temperature**, **radius** - Of `NIW`'s options.
    * **create_graph** (bool) - Whether the result is a function of L_0.
    * **known** (tuple, *optional*, default=()) - What the episode's step before has shown of the loss.
    """
    rows = sum([t[(0,) * losses.dim()].numel() for own in outputs for t in own.tensors[:1]])
    check_size(rows, z)
    known = known if len(known) == len(outputs) else (None,) * len(outputs)
    settings = likelihood, latent.noise(), n, create_graph
    seen, known = zip(*[look(losses, own, *settings, before) for own, before in zip(outputs, known)])
    found = energy(losses, seen, z, temperature, partial(jacobian, create_graph=create_graph), create_graph)
    if not create_graph:
        found, z = type(found)(*[t.detach() for t in found]), z.detach()
    covariance = spread(found.w)
    evidence = log_evidence(found.value, z, covariance)
    unit = n / seen[0].factor.detach()
    new = gauss_newton(z, found.gradient, covariance, radius)
    constant = torch.as_tensor(sum([one.constant for one in seen]) / n).detach().to(evidence).expand_as(evidence)
    return Solution(new, covariance, evidence, unit, constant, seen[0].likelihood, known)


def check_size(rows: int, z: Tensor) -> None:
    """Raises where the Jacobian of so many outputs would not fit."""
    if rows * z.numel() > LARGEST:
        raise ArgumentError(
            f"the Jacobian of {rows} outputs in {z.shape[-1]} coordinates would take "
            f"{rows * z.numel() * z.element_size() / 2**30:.1f} GiB. Make fewer weights random, random='last_layer' or "
            "a pattern, or give rank=8, which has 8 coordinates."
        )


def call(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The function's value."""
    return function(tensor)


def predictive(
    outputs: Any,
    likelihood: Optional[str],
    covariance: Spread,
    z: Tensor,
    lead: int,
    create_graph: bool,
    apply: Callable[[Tensor, Callable], Tensor] = call,
) -> Any:
    """
    A forward's outputs with the posterior's spread in them, by the outputs' Jacobian in z. Under `vmap`, `apply` calls
    a function on the tensor of all episodes.
    """

    def variances(means: Tensor) -> Tensor:
        check_size(means.shape[-1], z)
        return covariance.variances(jacobian(means, z, create_graph))

    return widened(outputs, likelihood, lambda means: apply(means, variances), lead)


class LatentWeights(GaussianWeights):
    """
    **Description**

    A Gaussian over a model's random weights, m_0 + U z with z ~ N(z_i, S): one with correlations. `mean` and
    `variance`, the diagonal, are dicts by parameter name, `z` and `covariance` are in the prior's coordinates. Beside
    sampled networks, `predict`, it has the linearised predictive in closed form, `linearised`.

    **Arguments**

    * **module** (Module) - The model.
    * **latent** (Latent) - L_0.
    * **z** (Tensor) - The mean, (coordinates,), or of B tasks, (B, coordinates).
    * **spread** (Spread) - The covariance, or None for the prior's.
    * **likelihood** (str, *optional*, default=None) - What outputs that are a tensor parametrise.

    **Example**

    ~~~python
    post = learner.posterior()
    prediction = post.linearised(x)         # a Normal with the noise in it, or a Categorical
    ~~~
    """

    def __init__(
        self,
        module: nn.Module,
        latent: Latent,
        z: Tensor,
        spread: Optional[Spread] = None,
        likelihood: Optional[str] = None,
        vectorize: Optional[bool] = None,
    ):
        self._latent, self.z, self._likelihood = latent, z, likelihood
        none = z.new_zeros(*z.shape[:-1], 0, z.shape[-1])
        self._spread = Spread(none, z.new_zeros(*z.shape[:-1], 0, 0)) if spread is None else spread
        super().__init__(module, latent.names, latent.weights(z), [], vectorize)

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> "LatentWeights":
        """The posteriors of several tasks as one with a leading dimension."""
        first = parts[0]
        spread = Spread(*[torch.stack(tensors) for tensors in zip(*[part._spread for part in parts])])
        z = torch.stack([part.z for part in parts])
        found = cls(first._module, first._latent, z, spread, first._likelihood, vectorize=False)
        if first.free_energy is not None:
            found.free_energy = torch.stack([part.free_energy for part in parts])
        return found

    def detached(self) -> "LatentWeights":
        """The same without a graph."""
        own = self._latent.detached(), self.z.detach(), self._spread.detached(), self._likelihood, self._vectorize
        found = LatentWeights(self._module, *own)
        found.free_energy = None if self.free_energy is None else self.free_energy.detach()
        return found

    @property
    def covariance(self) -> Tensor:
        """S, (..., coordinates, coordinates)."""
        return self._spread.covariance()

    @property
    def variance(self) -> Weights:
        """The weights' variances, by parameter name."""
        return dict(zip(self._latent.names, self._variances()))

    @variance.setter
    def variance(self, value: Weights) -> None:
        """Nothing: it follows from the covariance."""

    def _variances(self) -> List[Tensor]:
        found, lead = [], self.z.shape[:-1]
        for m, own, (begin, end) in zip(self._latent.m0, self._latent.directions, self._latent.places):
            if len(own) == 1 and own[0].shape == m.shape:
                w = self._spread.w[..., begin:end]
                pinned = torch.zeros_like(self.z[..., begin:end])
                if w.shape[-2] and self._spread.primal:
                    pinned = 1.0 - self._spread.covariance().diagonal(dim1=-2, dim2=-1)[..., begin:end]
                elif w.shape[-2]:
                    pinned = torch.linalg.solve_triangular(self._spread.lower, w, upper=False).square().sum(-2)
                found.append((1.0 - pinned).reshape(lead + m.shape) * own[0].exp())
                continue
            rows = self.z.new_zeros(m.numel(), self.z.shape[-1])
            directions = torch.einsum("ik,kj->kij", *own) if len(own) == 2 else own[0]
            rows[:, begin:end] = directions.reshape(end - begin, -1).mT
            found.append(self._spread.variances(rows.expand(*lead, *rows.shape)).reshape(lead + m.shape))
        return found

    def rsample(self) -> Weights:
        """One network's weights, reparametrised: gradients reach whatever the Gaussian depends on."""
        return dict(zip(self._latent.names, self._latent.weights(self.z + self._spread.draw())))

    def linearised(self, *args: Any, **kwargs: Any) -> Distribution:
        """
        **Description**

        The predictive distribution of the network linearised around the posterior's mean, in closed form: for outputs
        that are means a Gaussian with the learned noise in it, for logits a `Categorical` (or `Bernoulli`) by MacKay's
        approximation, for a model that returns a distribution the same with the posterior's spread in it. Cheaper than
        sampled networks, and better where the posterior is wide. For B tasks every tensor among the arguments has a
        leading dimension B.
        """
        if self._likelihood is None:
            raise ArgumentError("linearised: no loss has shown yet what outputs mean. Take a step first.")
        lead, graph = self.z.dim() - 1, self.z.requires_grad
        with torch.inference_mode(False), torch.enable_grad():
            z = self.z if graph else self.z.clone().requires_grad_()
            weights = dict(zip(self._latent.names, self._latent.weights(z)))
            if lead:
                stacked = {name: w.unsqueeze(0) for name, w in weights.items()}
                outputs = run_networks(self._module, stacked, args, kwargs, self._vectorize is not False)[0]
            else:
                outputs = self.network(weights)(*args, **kwargs)
            if isinstance(outputs, Tensor) and self._likelihood == "gaussian":
                outputs = Gaussian(outputs, self._latent.noise())
            outputs = predictive(outputs, self._likelihood, self._spread, z, lead, graph)
        if not isinstance(outputs, Tensor):
            return outputs if graph else without_graph(outputs)
        kinds = {"categorical": Categorical, "bernoulli": Bernoulli}
        return kinds[self._likelihood](logits=outputs if graph else outputs.detach(), validate_args=False)
