"""One task's network where the posterior has its full covariance: a clone of the model, in the prior's coordinates."""

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from l2l_niw.algorithms.base import Learner
from l2l_niw.errors import ArgumentError, ChainError, LossError
from l2l_niw.inference.laplace import Spread, expected_kl
from l2l_niw.inference.latent import Latent
from l2l_niw.inference.latent_gradient import State
from l2l_niw.inference.latent_posterior import LatentWeights, Solution, free_energy, posterior_of, predictive, step
from l2l_niw.inference.likelihood import Outputs, parts_of, without_graph
from l2l_niw.inference.meta_gradient import Tag
from l2l_niw.utils._checks import check_count, check_finite, check_loss, check_number, check_used
from l2l_niw.utils._functional import Replica, arrays_in, batch_size, run_with
from l2l_niw.utils._inputs import Inputs

if TYPE_CHECKING:
    from l2l_niw.algorithms.niw import NIW


class Forward(NamedTuple):
    """What a forward leaves for `adapt`: its tag, inputs and outputs, and whether the posterior's spread is in them."""

    tag: Tag
    inputs: Inputs
    given: List[Tensor]  # among the inputs, those with a graph of their own
    outputs: Any
    widened: bool


class Progress(NamedTuple):
    """How far an episode is: its last step's result, its steps, what they were taken on, and where the last began."""

    solution: Optional[Solution] = None
    steps: int = 0
    inputs: Tuple[Inputs, ...] = ()
    given: Tuple[Tensor, ...] = ()
    before: Optional[State] = None


START = Progress()


class LatentLearner(Learner):
    """
    **Description**

    What `NIW.clone()` returns with `rank` or curvature='full': a network for one task, at weights m_0 + U z. `adapt` is
    a Gauss-Newton step in z on the support's loss, which has to be a squared error, a cross-entropy, or the negative
    log-likelihood of a distribution that the model returns.

    Where the model returns a Gaussian, a query's variance has the posterior's added: that of a forward that is declared
    by `learner.query(x)`, or whose inputs are not those that the last step was taken on. With linearise='all' logits
    are shrunk by it too. Means stay as they are.
    """

    def __init__(self, niw: "NIW", latent: Latent, replica: Replica, progress: Progress, **flags: bool):
        super().__init__(replica.module)
        self.__dict__.update(
            flags,
            niw=niw,  # not a submodule: parameters() are this learner's own
            lr=niw.lr,
            _latent=latent,
            _replica=replica,
            _gap=latent.gap(),
            _share=1.0,  # of the free energy: less if the loss is divided by a number of episodes
        )
        self._set_state(progress)

    def _set_state(self, progress: Progress) -> None:
        """Makes where the last step led the learner's weights."""
        niw, latent, solution = self.niw, self._latent, progress.solution
        z = latent.zeros() if solution is None else solution.z
        energy = None
        if solution is not None and niw.options.add_kl_gradient and niw.options.kl_weight:
            energy = self._share * niw.options.kl_weight * free_energy(solution, self._gap)
        leaves = [*latent.leaves(), *niw._shared_weights(self._replica.module), *progress.given]
        beside = solution is not None and (niw.options.second_order == "last_step" or not solution.z.requires_grad)
        others = (*solution.spread, solution.evidence) if solution is not None and beside else ()
        state = State(z, energy, [t for t in leaves if t.requires_grad], beside, others, progress.before)
        coordinates, *rest = state.coordinates()
        if solution is not None and beside:
            solution = solution._replace(z=coordinates, spread=Spread(*rest[:2]), evidence=rest[2])
        self._replica.put(latent.weights(coordinates))
        own = {"_state": state, "_z": coordinates, "_solution": solution, "_progress": progress}
        self.__dict__.update(own, _forwards=[], _state_is_used=False)

    def _run(self, method: str, query: bool, *args: Any, **kwargs: Any) -> Any:
        """One forward, by a method of the model: notes its outputs, and widens them if it is a query's."""
        if self._state.z is None:
            raise ChainError(
                "the last step failed, and with second_order='last_step' the one before lost its graph. Clone anew."
            )
        if self._state.spent:
            self._replica.put(self._latent.weights(self._z))
            self._state.spent = False
        call = partial(getattr(self._modules["module"], method), *args, **kwargs)
        widened = self._progress.steps > 0 and self.niw.options.widens(self.niw._likelihood)
        support = self._progress.inputs
        widened = widened and (query or not self._are_among(support, args, kwargs, "linearise='none'"))
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return self._predict(call) if widened else call()
        outputs = own = call()
        if widened:
            outputs = predictive(own, self.niw._likelihood, self._solution.spread, self._z, 0, True)
        n = batch_size(outputs, (args, kwargs))
        if n is None:
            self.niw._warn(
                "a forward has no batch dimension, so it counts as one example. If it is not, pass n to adapt."
            )
        given = [a for a in arrays_in((args, kwargs)) if isinstance(a, Tensor) and a.requires_grad]
        tag = Tag(1 if n is None else n, outputs, [id(t) for t in (*self._replica.get(), *given)])
        self._state.tags.append(tag)
        self._forwards.append(Forward(tag, Inputs(args, kwargs), given, outputs, outputs is not own))
        return outputs

    def _predict(self, call: Callable) -> Any:
        """A query's outputs, without a graph."""
        latent, spread = self._latent.detached(), self._progress.solution.spread.detached()
        with torch.inference_mode(False), torch.enable_grad():
            z = self._z.detach().clone().requires_grad_()
            outputs = run_with(lambda: self._replica, latent.weights(z), call)
            outputs = predictive(outputs, self.niw._likelihood, spread, z, 0, False)
        return without_graph(outputs)

    def adapt(
        self,
        loss: Tensor,
        first_order: Optional[bool] = None,
        allow_unused: Optional[bool] = None,
        allow_nograd: Optional[bool] = None,
        n: Optional[int] = None,
    ) -> None:
        """
        **Description**

        Takes one Gauss-Newton step in z on the loss and replaces the learner's weights. On an error the learner is left
        as it was, but the loss is spent: compute it anew. With second_order='last_step', clone anew.

        **Arguments**

        * **loss** (Tensor) - Mean loss over the support.
        * **first_order** (bool, *optional*, default=None) - Whether the step's result is a constant to L_0. Defaults to
            the learner's.
        * **allow_unused** (bool, *optional*, default=None) - Whether parameters that the loss does not depend on are
            let be. Defaults to the learner's.
        * **allow_nograd** (bool, *optional*, default=None) - Whether parameters with `requires_grad = False` are let
            be. Defaults to the learner's.
        * **n** (int, *optional*, default=None) - The number of examples behind the loss. Defaults to the batch sizes of
            the forwards that it was computed from.
        """
        niw, options = self.niw, self.niw.options
        check_count(n)
        niw._check_frozen(self.allow_nograd if allow_nograd is None else allow_nograd)
        check_loss(loss)
        check_finite(loss.detach(), "adapt: the loss")
        forwards = self._behind(loss, self.allow_unused if allow_unused is None else allow_unused)
        n = n or sum([forward.tag.n for forward in forwards]) or 1
        constant = self.first_order if first_order is None else first_order
        if len(forwards) == len(self._forwards) and not self._state_is_used:
            self._release()  # before the step's own graph is made
        solution = step(
            self._latent,
            self._z,
            loss.reshape(()),
            [parts_of(forward.outputs) for forward in forwards],
            n,
            niw._likelihood or options.likelihood,
            options.temperature,
            options.radius,
            not (constant or options.second_order == "none"),
            self._progress.solution.known if self._progress.solution else (),
        )
        check_finite(solution.z.detach().sum(), "adapt: the step's result")
        niw.__dict__["_likelihood"] = solution.likelihood
        for forward in forwards:
            forward.tag.stepped_on = True
        inputs, given = tuple(f.inputs for f in forwards), [*self._progress.given]
        given += [t for f in forwards for t in f.given if not any(t is own for own in given)]
        before = self._state if options.second_order == "last_step" else None
        self._set_state(Progress(solution, self._progress.steps + 1, inputs, tuple(given), before))
        niw.__dict__["_newest"] = solution.detached(), self._latent.detached()

    def _release(self) -> None:
        """Lets go of the last step's graph, if it is kept beside."""
        self._state.release()
        solution = self._progress.solution
        if self._state.z is None and solution is not None:
            self.__dict__.update(_progress=self._progress._replace(solution=solution.detached()), _solution=None)

    def _behind(self, loss: Tensor, allow_unused: bool) -> List[Forward]:
        """The forwards that the loss was computed from."""
        if not self.niw._saw_used:  # once per wrapper, as it is a whole backward
            weights = self._replica.get()
            found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
            check_used(self._latent.names, found, allow_unused)
            self.niw.__dict__["_saw_used"] = True
        if len(self._forwards) == 1 and self._progress.steps and not self._forwards[0].widened:
            return self._forwards  # looked at in the first step; without one, it is used
        tensors = [parts_of(forward.outputs).tensors for forward in self._forwards]
        every = [t for own in tensors for t in own if t.requires_grad]
        found = torch.autograd.grad(loss, every, retain_graph=True, allow_unused=True) if every else ()
        used = {id(t) for t, g in zip(every, found) if g is not None}
        forwards = [f for f, own in zip(self._forwards, tensors) if any([id(t) in used for t in own])]
        if not forwards:
            raise LossError(
                "adapt: the loss came by no forward of this learner since its last step. Compute it from its outputs, "
                "`learner(x)`."
            )
        if True in [forward.widened for forward in forwards]:
            self.niw._warn(
                "a step was taken on the loss of a query's outputs, as its inputs are not those of the step before, "
                "and the posterior's spread is in them. Step on the same support each time, or choose linearise='none'."
            )
        return forwards

    def posterior(
        self,
        nll: Optional[Callable] = None,
        steps: int = 5,
        lr: Optional[float] = None,
        samples: int = 1,
        n: Optional[int] = None,
    ) -> LatentWeights:
        """
        **Description**

        Without arguments, q_i after the steps so far, a differentiable function of L_0: its mean is where the last one
        led, its covariance that of the outputs linearised where it began. With `nll`, meta-test inference: as many
        Gauss-Newton steps from the mode phi*, without a graph.

        **Arguments**

        * **nll** (callable, *optional*, default=None) - Takes a network, `network(x)`, and returns the support's mean
            loss.
        * **steps** (int, *optional*, default=5) - Gauss-Newton steps.
        * **lr**, **samples** - Not used here; of a chain's learner.
        * **n** (int, *optional*, default=None) - The number of support examples. Defaults to the batch size that the
            network was called with.

        **Returns** a `LatentWeights`.
        """
        if nll is not None:
            return self._test_posterior(nll, steps, n)
        solution = self._require_step("posterior")
        return posterior_of(self.module, self._latent, solution, self.niw.options.temperature)

    def _test_posterior(self, nll: Callable, steps: int, n: Optional[int]) -> LatentWeights:
        check_number("steps", steps, 0, whole=True)
        check_count(n)
        options, latent = self.niw.options, self._latent.at_mode().detached()
        post = LatentWeights(self.module, latent, torch.zeros_like(self._z.detach()), None, self.niw._likelihood)
        for _ in range(steps):
            seen: List[Tuple[Outputs, int]] = []

            def noting(*args: Any, **kwargs: Any) -> Any:
                outputs = network(*args, **kwargs)  # noqa: B023
                seen.append((parts_of(outputs), batch_size(outputs, (args, kwargs)) or 1))  # noqa: B023
                return outputs

            with torch.inference_mode(False), torch.enable_grad():
                z = post.z.clone().requires_grad_()
                network = post.network(dict(zip(latent.names, latent.weights(z))))
                loss = nll(noting)
                if not seen:
                    raise LossError("posterior: nll must call the network that it is given, `nll(network)`.")
                check_loss(loss, "posterior: nll's loss")
                check_finite(loss.detach(), "posterior: nll's loss")
                outputs, likelihood = [own for own, _ in seen], self.niw._likelihood or options.likelihood
                count = n or sum([size for _, size in seen])
                settings = likelihood, options.temperature, options.radius
                solution = step(latent, z, loss.reshape(()), outputs, count, *settings, create_graph=False)
            post = posterior_of(self.module, latent, solution, options.temperature, at_mode=True)
        return post

    def kl(self) -> Tensor:
        """
        **Description**

        The expected KL of the episode's posterior, E_q(phi) KL(q_i || p(theta | phi)), in nats, with gradients to L_0.

        **Returns** a scalar.
        """
        solution = self._require_step("kl")
        return expected_kl(solution.z, solution.spread, self._latent.n0, self._latent.wishart)

    def objective(self, loss: Tensor, n: Optional[int] = None) -> Tensor:
        """
        **Description**

        The episode's objective written out, for a wrapper with `add_kl_gradient=False`: the mean query loss plus
        kl_weight * F / n, F the support's free energy in units of the loss.

        **Arguments**

        * **loss** (Tensor) - Mean loss over the query.
        * **n** (int, *optional*, default=None) - The query's number of examples. Defaults to the batch size of the only
            forward since the last step.

        **Returns** a scalar to be back-propagated.
        """
        options = self.niw.options
        if options.add_kl_gradient:
            raise ArgumentError(
                "objective: with add_kl_gradient=True the free energy's gradient is added already; build NIW with "
                "add_kl_gradient=False."
            )
        n = self._query_examples(n)
        return loss + options.kl_weight / n * free_energy(self._require_step("objective"), self._gap)

    def _require_step(self, call: str) -> Solution:
        if self._solution is None:
            raise ChainError(
                f"{call}: this learner has taken no step, so there is nothing to infer from. Call adapt(loss) first"
                + (", or pass nll for inference from the mode." if call == "posterior" else ".")
            )
        self.__dict__["_state_is_used"] = True
        return self._solution

    def clone(
        self,
        first_order: Optional[bool] = None,
        allow_unused: Optional[bool] = None,
        allow_nograd: Optional[bool] = None,
    ) -> "LatentLearner":
        """A learner that continues this one's steps, on its own, with a graph to where they led."""
        self.__dict__["_state_is_used"] = True
        flags = self._flags(first_order, allow_unused, allow_nograd)
        replica = Replica(self._modules["module"], self._replica.get())
        return LatentLearner(self.niw, self._latent, replica, self._progress, **flags)

    def __getstate__(self) -> Dict[str, Any]:
        """Without what has a graph, but for the weights."""
        solution = self._progress.solution
        progress = self._progress._replace(solution=solution and solution.detached(), given=(), before=None)
        own = {"_progress": progress, "_latent": self._latent.detached(), "_forwards": []}
        return {**self.__dict__, **own, **dict.fromkeys(("_state", "_z", "_solution", "_gap"))}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        for tensor in self._latent.leaves():
            tensor.requires_grad_()
        self.__dict__["_gap"] = self._latent.gap()
        self._set_state(self._progress)

    def __deepcopy__(self, memo: dict) -> "LatentLearner":
        """With weights that are leaves: a graph cannot be copied."""
        memo.update({id(w): w.detach().clone().requires_grad_(w.requires_grad) for w in self._replica.get()})
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin


@torch.no_grad()
def latent_diagnostics(solution: Solution, latent: Latent, second_order: str) -> Dict[str, Any]:
    """What `NIW.diagnostics` says where the posterior has its full covariance; means over episodes."""
    pinned = 1.0 - solution.spread.trace() / latent.size
    moved, prior = latent.offsets(solution.z), LatentWeights(nn.Module(), latent, latent.zeros())
    layers = {
        name: {"prior_std": variance.mean().sqrt().item(), "moved": offset.square().mean().sqrt().item()}
        for (name, variance), offset in zip(prior.variance.items(), moved)
    }
    return {
        "share": pinned.mean().item(),
        "length": solution.z.norm(dim=-1).mean().item(),
        "evidence": solution.evidence.mean().item(),
        "likelihood": solution.likelihood,
        "noise": latent.noise().item() if solution.likelihood == "gaussian" else None,
        "n0": latent.n0.item(),
        "second_order": second_order,
        "layers": layers,
    }
