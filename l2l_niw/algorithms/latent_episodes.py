"""A batch of episodes whose posteriors have their full covariance, in one call."""

from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.func import vmap

from l2l_niw.errors import LossError
from l2l_niw.inference.last_layer import Lift
from l2l_niw.inference.latent import Latent
from l2l_niw.inference.latent_gradient import State
from l2l_niw.inference.latent_posterior import Solution, free_energy, predictive, step
from l2l_niw.inference.likelihood import Outputs, parts_of, rebuilt
from l2l_niw.inference.meta_gradient import Tag
from l2l_niw.inference.mixture import Energies
from l2l_niw.utils._checks import check_finite, check_used
from l2l_niw.utils._functional import Replica, batch_size

if TYPE_CHECKING:
    from l2l_niw.algorithms.batched import Data, Loss
    from l2l_niw.algorithms.niw import NIW


class Result(NamedTuple):
    """Of B episodes: their losses, (B,), the examples of each, and what their outputs are made of."""

    losses: Tensor
    n: int
    outputs: List[Outputs]


class LatentEpisodes:
    """
    **Description**

    B episodes at once in the prior's coordinates: what `BatchedEpisodes` runs with `rank` or curvature='full'.

    **Arguments**

    * **niw** (NIW) - The wrapper.
    * **loss**, **query_loss** (callable) - Of one episode, as those of `BatchedEpisodes`.
    * **steps** (int) - Gauss-Newton steps.
    """

    def __init__(self, niw: "NIW", loss: "Loss", query_loss: "Loss", steps: int):
        self.niw, self.loss, self.query_loss, self.steps = niw, loss, query_loss, steps

    def mean_loss(self, support: "Data", query: "Data") -> Tensor:
        """The mean query loss, whose back-propagation adds the free energy's gradient unless that is written out."""
        niw, options, latent, size = self.niw, self.niw.options, self.niw._latent(), len(support[0])
        solution = self.solve(latent, support, self.steps, not niw.first_order and options.second_order != "none")
        energy = options.kl_weight / size * free_energy(solution, latent.gap()) if options.kl_weight else None
        automatic = options.add_kl_gradient
        state = State(solution.z, energy if automatic else None, [t for t in latent.leaves() if t.requires_grad])
        result = self._run(self.query_loss, latent, state.coordinates()[0], query, solution)
        check_finite(result.losses.detach(), "the query loss")
        if automatic:
            state.tags.append(Tag(result.n, result.losses))
        loss = result.losses.mean()
        return loss if automatic or energy is None else loss + energy / result.n

    def energies(self, support: "Data", query: "Data") -> Energies:
        """What every episode costs, in nats, with a graph to L_0."""
        niw, options, latent = self.niw, self.niw.options, self.niw._latent()
        solution = self.solve(latent, support, self.steps, not niw.first_order and options.second_order != "none")
        leaves = [t for t in latent.leaves() if t.requires_grad]
        result = self._run(self.query_loss, latent, State(solution.z, None, leaves).coordinates()[0], query, solution)
        check_finite(result.losses.detach(), "the query loss")
        return energies_of(solution, latent, result.losses, result.n, options.temperature)

    def solve(self, latent: Latent, support: "Data", steps: int, create_graph: bool) -> Solution:
        """The posteriors after some steps."""
        niw, options = self.niw, self.niw.options
        niw._check_frozen(niw.allow_nograd)
        z = latent.zeros().expand(len(support[0]), -1)
        known: Tuple[Any, ...] = ()
        for _ in range(steps):
            if not (create_graph and options.second_order == "all" and z.requires_grad):
                z = z.detach().clone().requires_grad_()
            result = self._run(self.loss, latent, z, support)
            check_finite(result.losses.detach(), "the support loss")
            likelihood = niw._likelihood or options.likelihood
            settings = likelihood, options.temperature, options.radius
            given = latent, z, result.losses, result.outputs, result.n
            solution = step(*given, *settings, create_graph, known)
            niw.__dict__["_likelihood"], z, known = solution.likelihood, solution.z, solution.known
        check_finite(z.detach().sum(-1), "the last step's result")
        niw.__dict__["_newest"] = solution.detached(), latent.detached()
        return solution

    def _run(
        self, loss: "Loss", latent: Latent, z: Tensor, data: "Data", solution: Optional[Solution] = None
    ) -> Result:
        """The losses of B networks on their own data; of queries, with the posteriors' spread in their outputs."""
        niw, replica = self.niw, Replica(self.niw.module, self.niw._random()[1])
        counts: List[Optional[int]] = []
        seen: List[Outputs] = []
        widen = solution if niw.options.widens(niw._likelihood) else None

        def network(*args: Any, **kwargs: Any) -> Any:
            outputs = replica.module(*args, **kwargs)
            counts.append(batch_size(outputs, (args, kwargs)))
            if widen is not None:
                return predictive(outputs, niw._likelihood, widen.spread, z, 0, True, Lift.apply)
            if solution is not None:
                return outputs
            parts = parts_of(outputs)
            lifted, whole = zip(*[lift(t, len(z)) for t in parts.tensors])
            seen.append(parts._replace(tensors=whole))
            return rebuilt(outputs, lifted)

        def one(own: List[Tensor], data: "Data") -> Tensor:
            replica.put(own)
            value = loss(network, *data)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise LossError("the loss of an episode must be a scalar tensor; average it over the examples.")
            return value.reshape(())

        weights = latent.weights(z)
        losses = vmap(one, randomness="different")(weights, tuple(data))
        if not counts or not losses.requires_grad:
            raise LossError("the loss does not depend on its network: compute it as loss(network, ...).")
        if not niw._saw_used:  # once per wrapper, as it is a whole backward
            found = torch.autograd.grad(losses.sum(), weights, retain_graph=True, allow_unused=True)
            check_used(latent.names, found, niw.allow_unused)
            niw.__dict__["_saw_used"] = True
        if None in counts:
            niw._warn("a forward has no batch dimension, so it counts as one example.")
        return Result(losses, sum([1 if n is None else n for n in counts]) or 1, seen)


def energies_of(solution: Solution, latent: Latent, losses: Tensor, n: int, temperature: float) -> Energies:
    """What episodes cost whose supports have been solved, and whose queries, of n examples each, have these losses."""
    support, unit = temperature * (latent.gap() - solution.evidence), solution.unit / n
    return Energies(support, losses / unit, torch.zeros_like(support), n * solution.constant, unit)


def lift(tensor: Tensor, size: int) -> Tuple[Tensor, Tensor]:
    """A tensor of one episode as its loss is to have it, and that of all episodes, which the loss depends on."""
    if not torch._C._functorch.is_batchedtensor(tensor):
        return tensor, tensor.expand(size, *tensor.shape)
    whole: List[Tensor] = []

    def note(every: Tensor) -> Tensor:
        whole.append(every)
        return every

    lifted = Lift.apply(tensor, note)
    return lifted, whole[0]
