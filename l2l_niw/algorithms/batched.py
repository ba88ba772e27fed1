"""A batch of episodes in one call: B chains, B posteriors and one meta-gradient."""

import warnings
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from l2l_niw.algorithms.latent_episodes import LatentEpisodes, energies_of
from l2l_niw.algorithms.mixture import NIWMixture
from l2l_niw.algorithms.niw import NIW
from l2l_niw.errors import ArgumentError, LossError, NIWError
from l2l_niw.inference import chain as chains
from l2l_niw.inference.chain import Chain, as_functions_of_prior, mean_of
from l2l_niw.inference.elbo import minimise_elbo
from l2l_niw.inference.gaussian import GaussianWeights
from l2l_niw.inference.last_layer import Cuts, Lift, differentiate
from l2l_niw.inference.latent_posterior import LatentWeights, posterior_of
from l2l_niw.inference.meta_gradient import State, Tag
from l2l_niw.inference.mixture import Energies, MixtureWeights, mixture_objective
from l2l_niw.inference.objective import expected_kl
from l2l_niw.inference.posterior import draw_network, posterior
from l2l_niw.inference.prior import Prior
from l2l_niw.utils._checks import check_finite, check_number, check_used
from l2l_niw.utils._functional import Replica, batch_size

Data = Sequence[Tensor]
Loss = Callable[..., Tensor]
BATCH_NORM = "its BatchNorm writes running statistics; l2l_niw.models.batch_statistics(model) removes them."


class Result(NamedTuple):
    """Of B episodes: their losses, (B,), the examples of each, and the curvature strategy's scalars, (B, S)."""

    losses: Tensor
    n: int
    scalars: Tensor


class BatchedEpisodes:
    """
    **Description**

    Runs a batch of episodes as the loop of `clone`, `adapt` and a query loss does, but at once: every weight has a
    leading dimension of B episodes, `vmap` gives each its own network, and one call of each operation serves them all.
    On small networks, where a loop spends its time between operations, that is many times faster.

    Calling it gives the mean query loss. Its `backward` gives every parameter of `niw.parameters()` the
    gradient of the mean over episodes of query loss + kl_weight * KL / n, as the loop does; with
    `add_kl_gradient=False` the KL is part of the value too. Roles are given, so that the query may be the support
    itself. Data of the query that require gradients, such as features of a network that all tasks share, get theirs.
    A batch too large for the memory goes in parts, each with its own `backward`.

    A model that cannot be vmapped (BatchNorm with running statistics, control flow that looks at values) runs in a
    loop instead, and one warning says why.

    **Arguments**

    * **niw** (NIW) - The wrapper.
    * **loss** (callable) - `loss(network, *support)`: the mean loss of one episode, whose network is `network(x)`.
    * **query_loss** (callable, *optional*, default=None) - `query_loss(network, *query)`. Defaults to `loss`.
    * **steps** (int, *optional*, default=5) - Inner steps.
    * **responsibilities** (str, *optional*, default='evidence') - Of a mixture, what each component has of a task in
        training: 'evidence', as much as it explains support and query, so that components specialise, for tasks of
        several kinds; 'uniform', an equal share, which makes an ensemble, for tasks of one kind.

    **Example**

    ~~~python
    episodes = BatchedEpisodes(niw, lambda network, x, y: F.mse_loss(network(x), y), steps=5)
    opt.zero_grad()
    episodes((x, y), (x_query, y_query)).backward()                       # tensors (B, n, ...)
    opt.step()
    outputs = episodes.posterior((x, y)).predict(x_query, samples=10)     # (10, B, m, ...)
    ~~~
    """

    def __init__(
        self,
        niw: NIW,
        loss: Loss,
        query_loss: Optional[Loss] = None,
        steps: int = 5,
        responsibilities: str = "evidence",
    ):
        check_number("steps", steps, 1, whole=True)
        if responsibilities not in ("evidence", "uniform"):
            raise ArgumentError(f"responsibilities must be 'evidence' or 'uniform', got {responsibilities!r}.")
        self.niw, self.loss, self.query_loss, self.steps = niw, loss, query_loss or loss, steps
        self.responsibilities = responsibilities
        self._parts: List[BatchedEpisodes] = []  # of a mixture's components
        if isinstance(niw, NIWMixture):
            self._parts = [BatchedEpisodes(part, loss, query_loss, steps) for part in niw.components]
            return
        self._looped = False  # whether the model could not be vmapped, and could run in a loop

    def __call__(self, support: Data, query: Data) -> Tensor:
        """The mean query loss of the episodes, a scalar; every tensor has a leading dimension of B episodes."""
        count_episodes(support=support, query=query)
        if self._parts:
            return self._mixture_loss(support, query)
        vectorized = self._latent.mean_loss if self.niw.options.latent else self._mean_loss
        return self._vectorized_or(vectorized, self._looped_loss, support, query)

    @property
    def _latent(self) -> LatentEpisodes:
        """What runs them with rank or curvature='full'."""
        return LatentEpisodes(self.niw, self.loss, self.query_loss, self.steps)

    def _components(self) -> List["BatchedEpisodes"]:
        """Those of a mixture's components, as these are now."""
        for part in self._parts:
            part.loss, part.query_loss, part.steps = self.loss, self.query_loss, self.steps
        return self._parts

    def _mixture_loss(self, support: Data, query: Data) -> Tensor:
        niw, options, uniform = self.niw, self.niw.options, self.responsibilities == "uniform"
        parts = [p._vectorized_or(p._energies, p._looped_energies, support, query) for p in self._components()]
        weight = options.kl_weight / options.temperature if options.latent else 0.0
        found = mixture_objective(niw.log_weights, parts, weight, uniform)
        niw._note(found.log_responsibilities, warn=not uniform)
        niw._give_gradients()
        rest = found.rest - found.rest.detach() if options.add_kl_gradient else found.rest
        return (found.loss + rest).mean()

    def posterior(
        self, support: Data, elbo_steps: Optional[int] = None, lr: Optional[float] = None, samples: int = 1
    ) -> Any:
        """
        **Description**

        The posteriors of B tasks, as one with a leading dimension. From their chains, as `learner.posterior()`; with
        `elbo_steps`, by steps on the support's ELBO, as `learner.posterior(nll)`.

        **Arguments**

        * **support** (sequence) - Tensors with a leading dimension B.
        * **elbo_steps** (int, *optional*, default=None) - The paper's M_V.
        * **lr** (float, *optional*, default=None) - Step size on the ELBO. Defaults to the wrapper's.
        * **samples** (int, *optional*, default=1) - Networks drawn per step on the ELBO.

        **Returns** a `GaussianWeights` of B tasks: means and variances are (B, ...). Of a mixture, a `MixtureWeights`.
        """
        count_episodes(support=support)
        if self._parts:
            return self._mixture_posterior(support, elbo_steps, lr, samples)
        lr = self.niw.lr if lr is None else lr
        if elbo_steps is not None:
            check_number("elbo_steps", elbo_steps, 0, whole=True)
        check_number("lr", lr, 0, strict=True)
        check_number("samples", samples, 1, whole=True)
        if self.niw.options.latent:
            return self._vectorized_or(self._latent_posterior, self._looped_latent, support, elbo_steps)
        given = support, elbo_steps, lr, samples
        mean, variance = self._vectorized_or(self._moments, self._looped_moments, *given)
        vectorize = False if self._looped else None
        return GaussianWeights(self.niw.module, self.niw._prior().names, mean, variance, vectorize)

    def _mixture_posterior(self, support: Data, *settings: Any) -> MixtureWeights:
        parts = [part.posterior(support, *settings) for part in self._components()]
        for own, post in zip(self._parts, parts):
            if post.free_energy is None and not self.niw.options.latent:
                given = own._free_energies, own._looped_free_energies, post.detached(), support
                post.free_energy = own._vectorized_or(*given)
        return self.niw._weighed(parts, (len(support[0]),))

    def _free_energies(self, post: GaussianWeights, support: Data) -> Tensor:
        """Every support's, in nats, without a graph: its summed loss at its posterior's mean, plus kl_weight * KL."""
        prior, mean = self._prior(), [m.requires_grad_() for m in post.mean.values()]
        result, _ = self._run(self.loss, mean, support)
        with torch.no_grad():
            kl = self.niw._weighted_kl(post, prior)
        return result.n * result.losses.detach() + kl

    def _looped_free_energies(self, post: GaussianWeights, support: Data) -> Tensor:
        found = []
        for i in range(len(support[0])):
            mean, variance = ([t[i] for t in part.values()] for part in (post.mean, post.variance))
            own = GaussianWeights(self.niw.module, list(post.mean), mean, variance)
            data = [t[i] for t in support]
            found.append(self.niw._free_energy(own, lambda network, data=data: self.loss(network, *data), None))
        return torch.stack(found)

    def _latent_posterior(self, support: Data, steps: Optional[int]) -> LatentWeights:
        """Posteriors with their full covariance, after the steps of training or, from the mode, after some others."""
        latent = self.niw._latent()
        graph = steps is None and not self.niw.first_order and self.niw.options.second_order != "none"
        if steps is not None:
            latent = latent.at_mode().detached()
        if steps == 0:
            return LatentWeights(self.niw.module, latent, latent.zeros().expand(len(support[0]), -1))
        solution = self._latent.solve(latent, support, steps or self.steps, graph)
        at_mode = steps is not None
        return posterior_of(self.niw.module, latent, solution, self.niw.options.temperature, at_mode)

    def _looped_latent(self, support: Data, steps: Optional[int]) -> LatentWeights:
        found = []
        for i in range(len(support[0])):
            data = [t[i] for t in support]
            with torch.enable_grad():
                nll = lambda network, data=data: self.loss(network, *data)  # noqa: E731
                learner = self._looped_chain(data) if steps is None else self.niw.clone()
                found.append(learner.posterior() if steps is None else learner.posterior(nll, steps))
        return LatentWeights.stack(found)

    def _vectorized_or(self, vectorized: Callable, looped: Callable, *args: Any) -> Any:
        """What the first returns, or the second if this model's episodes cannot run at once."""
        if self._looped:
            return looped(*args)
        try:
            with torch.enable_grad(), buffers_restored_on_error(self.niw.module):
                return vectorized(*args)
        except NIWError:
            raise
        except RuntimeError as error:
            found = looped(*args)  # if it was not vmap's doing, this raises it again
            norms = any(isinstance(m, _BatchNorm) and m.training and m.track_running_stats for m in self.niw.modules())
            reason = BATCH_NORM if norms else str(error).splitlines()[0]
            warnings.warn(f"BatchedEpisodes run one after another instead of at once: {reason}", stacklevel=3)
            self._looped = True
            return found

    def _prior(self) -> Prior:
        self._replica = Replica(self.niw.module, self.niw._random()[1])
        self._shared_replica = Replica(self._replica.module, self.niw._shared_weights(self.niw.module), copy=False)
        return self.niw._prior()

    def _mean_loss(self, support: Data, query: Data) -> Tensor:
        options, size = self.niw.options, len(support[0])
        if options.kl_weight and not options.add_kl_gradient:
            found = self._energies(support, query, with_support=False)
            return (found.unit * (found.query + found.kl)).mean()
        state, weights, _, _ = self._queried(support, options.kl_weight / size)
        result, _ = self._run(self.query_loss, weights, query)
        check_finite(result.losses.detach(), "the query loss")
        state.tags.append(Tag(result.n, result.losses))
        return result.losses.mean()

    def _queried(self, support: Data, kl_weight: float) -> Tuple[State, List[Tensor], Chain, Prior]:
        """The weights that queries run at after their chains; a backward adds the KL's gradient by its weight."""
        niw, options, prior = self.niw, self.niw.options, self._prior()
        curvature, settings = options.curvature, options.settings(niw.lr)
        chain = self._run_chains(prior, support)
        drawn = options.inference == "closed_form"
        state = State(mean_of(chain) if drawn else chain[:3], chain, prior, curvature, settings, kl_weight)
        weights = state.weights()
        if drawn:
            weights = draw_network(chain, weights, prior, curvature, settings)
        return state, weights, chain, prior

    def _energies(self, support: Data, query: Data, with_support: bool = True) -> Energies:
        """What every episode costs, in nats, with a graph to L_0; the support's own loss only if it is asked for."""
        niw, options = self.niw, self.niw.options
        if options.latent:
            return self._latent.energies(support, query)
        _, weights, chain, prior = self._queried(support, 0.0)
        result, _ = self._run(self.query_loss, weights, query)
        check_finite(result.losses.detach(), "the query loss")
        kl = seen = torch.zeros_like(result.losses)
        if with_support:
            own, _ = self._run(self.loss, weights, support)
            seen = own.n * own.losses
        if options.kl_weight:
            mean = as_functions_of_prior(*mean_of(chain), prior.log_variance)
            q = posterior(chain, prior, options.curvature, options.settings(niw.lr), mean)
            kl = options.kl_weight * expected_kl(q, prior)
        return chain_energies(seen, result.losses, result.n, kl)

    def _run_chains(self, prior: Prior, support: Data) -> Chain:
        """B chains after their steps."""
        niw, options, settings = self.niw, self.niw.options, self.niw.options.settings(self.niw.lr)
        niw._check_frozen(niw.allow_nograd)
        with_graph, looks = self._with_graph(prior, support), options.curvature.needs_outputs
        chain, losses = chains.init(prior.m0, (len(support[0]),)), []
        first: List[Optional[Tensor]] = []
        for step in range(self.steps):
            state = State(chain[:3], chain, prior, options.curvature, settings)
            weights = state.weights()
            result, cuts = self._run(self.loss, weights, support, with_graph, first)
            total = result.losses.sum()
            gradients = differentiate(
                total, weights, [cuts] if cuts else [], bool(with_graph), bool(with_graph) or looks
            )
            if cuts:
                niw._look_past(gradients, [cuts], weights, with_graph)
            if None in [g if g is None else True for g in gradients]:
                check_used(prior.names, gradients, niw.allow_unused)
            if len(with_graph) == len(weights):
                chain = chain._replace(origin=weights)
            if looks:
                chain = chain._replace(observed=self._observe(result, weights, chain.observed))
            chain = chains.step(chain, gradients, prior, result.n, settings, with_graph)
            losses.append(result.losses.detach())
            if cuts:
                state.release(with_graph)
                first = first or cuts.inside
                for cut in cuts.cuts if step else ():
                    cut.release()
        check_finite(torch.stack(losses).sum(0), "the support loss")
        check_finite(torch.stack([t.reshape(len(t), -1).sum(1) for t in chain.theta]).sum(0), "the last step's result")
        niw._remember(chain, prior, niw.lr)
        return chain

    def _with_graph(self, prior: Prior, support: Data) -> Sequence[int]:
        """The weights whose steps keep their graph."""
        niw, second_order = self.niw, self.niw.options.second_order
        if niw.first_order or second_order == "none":
            return ()
        if second_order == "all":
            return range(len(prior.m0))
        if niw._last_layer is None:
            data = [t[0].detach() for t in support]
            niw._find_last_layer(niw.module, "__call__", lambda model: self.loss(model, *data))
        return niw._in_last_layer(prior.names)

    def _run(
        self,
        loss: Loss,
        weights: Sequence[Tensor],
        data: Data,
        with_graph: Sequence[int] = (),
        first: Sequence[Optional[Tensor]] = (),
    ) -> Tuple[Result, Optional[Cuts]]:
        """The losses of B networks on their own data, and where their last layers begin."""
        niw, replica, counts = self.niw, self._replica, []
        needs_outputs, given = niw.options.curvature.needs_outputs, [t for t in data if t.requires_grad]

        def one(own: List[Tensor], data: Data) -> Tuple[Tensor, Tensor]:
            scalars: List[Tensor] = []
            replica.put(own)

            def network(*args: Any, **kwargs: Any) -> Any:
                outputs = replica.module(*args, **kwargs)
                counts.append(batch_size(outputs, (args, kwargs)))
                if needs_outputs:
                    scalars.append(torch.stack(list(niw.options.curvature.scalars(outputs))))
                return outputs

            value = loss(network, *data)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise LossError("the loss of an episode must be a scalar tensor; average it over the examples.")
            return value.reshape(()), sum(scalars[1:], scalars[0]) if scalars else value.detach()

        cuts, handle, shared = None, None, self._shared_replica.get()
        watch = niw.options.second_order == "last_layer" and 0 < len(with_graph) < len(weights) + len(shared)
        if watch and niw._can_cut and len(given) <= 1:
            aliases = [p.view_as(p) for p in shared]  # of this call alone: earlier steps depend on the weights too
            self._shared_replica.put(aliases)
            cuts = Cuts([*[w for i, w in enumerate(weights) if i not in with_graph], *aliases, *given], first)
            cut = cuts.cut

            def note(module: nn.Module, args: tuple) -> Optional[tuple]:
                return (Lift.apply(args[0], cut), *args[1:]) if args and isinstance(args[0], Tensor) else None

            layer = replica.module.get_submodule(niw._last_layer)  # type: ignore[arg-type]
            handle = layer.register_forward_pre_hook(note)
        try:
            losses, scalars = vmap(one, randomness="different")(list(weights), tuple(data))
        finally:
            if handle is not None:
                handle.remove()
                self._shared_replica.put(shared)
        if cuts is not None and cuts.failed:
            niw._keep_whole_graphs()
        cuts = cuts if cuts is not None and cuts.cuts and not cuts.failed else None
        if not counts or not losses.requires_grad:
            raise LossError("the loss does not depend on its network: compute it as loss(network, ...).")
        if any([n is None for n in counts]):
            niw._warn("a forward has no batch dimension, so it counts as one example.")
        return Result(losses, sum([1 if n is None else n for n in counts]) or 1, scalars), cuts

    def _observe(self, result: Result, weights: List[Tensor], before: Optional[List[Tensor]]) -> List[Tensor]:
        """What the curvature strategy sees of all episodes, added to what it saw before."""
        observed = before or [torch.zeros_like(w) for w in weights]
        for scalar in result.scalars.sum(0).unbind():
            found = torch.autograd.grad(scalar, weights, retain_graph=True, allow_unused=True)
            observed = [o if g is None else o + g.square() for o, g in zip(observed, found)]
        return observed

    def _moments(
        self, support: Data, elbo_steps: Optional[int], lr: float, samples: int
    ) -> Tuple[List[Tensor], List[Tensor]]:
        """Means and variances, (B, ...)."""
        niw, options, prior = self.niw, self.niw.options, self._prior()
        if elbo_steps is not None:
            return self._elbo(prior, support, elbo_steps, lr, samples)
        chain = self._run_chains(prior, support)
        # in closed form the chain's moments are constants, as a learner's
        mean = as_functions_of_prior(*mean_of(chain), prior.log_variance) if options.inference == "langevin" else None
        return posterior(chain, prior, options.curvature, options.settings(niw.lr), mean)

    @torch.no_grad()
    def _elbo(
        self, prior: Prior, support: Data, steps: int, lr: float, samples: int
    ) -> Tuple[List[Tensor], List[Tensor]]:
        def gradients(weights: List[Tensor]) -> Tuple[List[Tensor], int]:
            with torch.enable_grad():
                leaves = [w.requires_grad_() for w in weights]
                result, _ = self._run(self.loss, leaves, support)
                total = result.losses.sum()
            check_finite(result.losses.detach(), "the support loss")
            found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
            return list(found), result.n

        mean, variance = prior.mode()
        mean, variance = ([t.expand(len(support[0]), *t.shape) for t in column] for column in (mean, variance))
        if self.niw.options.temperature == 0:
            variance = [torch.zeros_like(v) for v in variance]
        return minimise_elbo(gradients, mean, variance, lr, steps, samples, self.niw.options.kl_weight)

    def _looped_loss(self, support: Data, query: Data) -> Tensor:
        """The same, one episode after another."""
        options, total, size = self.niw.options, [], len(support[0])
        for i in range(size):
            with torch.enable_grad():
                learner, loss = self._looped_query([t[i] for t in support], [t[i] for t in query], 1.0 / size)
                if not options.add_kl_gradient:
                    loss = learner.objective(loss, sum(f.tag.n for f in learner._forwards))
                total.append(loss / size)
        return torch.stack(total).sum()

    def _looped_query(self, support: Data, query: Data, share: float) -> Tuple[Any, Tensor]:
        """A learner after its steps, and its query loss, whose backward adds this share of the KL's gradient."""
        learner = self._looped_chain(support)
        learner.__dict__["_share"] = share
        learner._set_state(learner._progress if self.niw.options.latent else learner._chain)
        loss = self.query_loss(learner.query, *query)
        check_finite(loss.detach(), "the query loss")
        return learner, loss

    def _looped_energies(self, support: Data, query: Data) -> Energies:
        """What every episode costs, one after another."""
        options, found = self.niw.options, []
        for i in range(len(support[0])):
            with torch.enable_grad():
                data = [t[i] for t in support]
                learner, loss = self._looped_query(data, [t[i] for t in query], 0.0)
                n = sum(f.tag.n for f in learner._forwards)
                if options.latent:
                    found.append(energies_of(learner._solution, learner._latent, loss, n, options.temperature))
                    continue
                kl = torch.zeros_like(loss)
                if options.kl_weight:
                    kl = options.kl_weight * expected_kl(learner._q(constant=False), learner._prior)
                seen = self.loss(learner.query, *data)
                count = sum(f.tag.n for f in learner._forwards) - n
                found.append(chain_energies(count * seen, loss, n, kl))
        return Energies(*map(torch.stack, zip(*found)))

    def _looped_chain(self, support: Data) -> Any:
        learner = self.niw.clone()
        for _ in range(self.steps):
            learner.adapt(self.loss(learner, *support))
        return learner

    def _looped_moments(self, support: Data, elbo_steps: Optional[int], lr: float, samples: int) -> tuple:
        found = []
        for i in range(len(support[0])):
            data = [t[i] for t in support]
            if elbo_steps is None:
                with torch.enable_grad():
                    found.append(self._looped_chain(data).posterior())
            else:
                nll = lambda network, data=data: self.loss(network, *data)  # noqa: E731
                found.append(self.niw.clone().posterior(nll, elbo_steps, lr, samples))
        columns = [[list(getattr(post, part).values()) for post in found] for part in ("mean", "variance")]
        return tuple([torch.stack(own) for own in zip(*column)] for column in columns)


def chain_energies(support: Tensor, losses: Tensor, n: int, kl: Tensor) -> Energies:
    """What episodes cost, from their supports' summed losses, their queries' mean ones over n, and the KL's part."""
    zero = torch.zeros_like(losses)
    return Energies(support + kl, n * losses, kl, zero, zero + 1.0 / n)


@contextmanager
def buffers_restored_on_error(module: nn.Module) -> Iterator[None]:
    """Gives a module's buffers, such as running statistics, their values back after an error."""
    before = [(b, b.clone()) for b in module.buffers()]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        raise


def count_episodes(**data: Data) -> int:
    """B, the leading dimension of all tensors."""
    sizes = {}
    for name, tensors in data.items():
        if isinstance(tensors, Tensor) or not tensors or not all(isinstance(t, Tensor) and t.dim() for t in tensors):
            raise ArgumentError(f"{name} must be a tuple of tensors with a leading dimension of episodes, as (x, y).")
        sizes.update({f"{name}[{i}]": len(t) for i, t in enumerate(tensors)})
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        raise ArgumentError(f"all tensors must have the same number of episodes, one at least; got {sizes}.")
    return next(iter(sizes.values()))
