"""What learners of one task have in common: the model's own attributes and methods, run at the task's weights."""

from functools import partial
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

from learn2learn.algorithms.base_learner import BaseLearner
from torch import Tensor, nn

from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_count
from l2l_niw.utils._inputs import Inputs


class Learner(BaseLearner):
    """
    **Description**

    A network for one task, as learn2learn's. `_run` is one forward, by a method of the model. `_state_is_used` notes
    that the user holds what comes back to the present weights.
    """

    def __getattr__(self, name: str) -> Any:
        """As learn2learn's learners: the model's attribute. Its methods run as `forward` does."""
        found = super().__getattr__(name)
        if isinstance(found, (nn.Module, Tensor)):  # what is computed from it comes back to this state
            self.__dict__["_state_is_used"] = True
        module = self.__dict__["_modules"].get("module")
        method = callable(found) and getattr(found, "__self__", None) is module is not None
        return partial(self._run, name, False) if method and not hasattr(nn.Module, name) else found

    @property
    def component(self) -> int:
        """Of a mixture, which component this is of."""
        return self.niw._component

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Tuple[str, nn.Parameter]]:
        """As a module's: the learner's weights, by name."""
        self.__dict__["_state_is_used"] = True
        return super().named_parameters(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs at the learner's weights; of a query, as the posterior has them."""
        return self._run("__call__", False, *args, **kwargs)

    def query(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs of a forward that is declared to be the query's, whatever its inputs."""
        return self._run("__call__", True, *args, **kwargs)

    def _run(self, method: str, query: bool, *args: Any, **kwargs: Any) -> Any:
        """One forward, by a method of the model."""
        raise NotImplementedError

    def _are_among(self, support: Sequence[Inputs], args: tuple, kwargs: dict, remedy: str) -> bool:
        """Whether the last step was taken on these inputs."""
        found = [inputs.same_as(args, kwargs) for inputs in support]
        if True not in found and None in found:
            self.niw._warn(
                "a forward's inputs cannot be compared with those of the last step, so it counts as a query. Say it by "
                f"learner.query(x), or choose {remedy}, where both are the same."
            )
        return True in found

    def _flags(self, *given: Optional[bool]) -> Dict[str, bool]:
        """MAML's flags for a clone: those given, else the learner's own."""
        names = "first_order", "allow_unused", "allow_nograd"
        return {name: getattr(self, name) if flag is None else flag for name, flag in zip(names, given)}

    def _query_examples(self, n: Optional[int]) -> int:
        """The query's examples: as given, or those of the only forward since the last step."""
        check_count(n)
        if n is None and len(self._forwards) != 1:
            number = "several" if self._forwards else "no"
            raise ArgumentError(f"objective: this learner had {number} forwards since its last step. Pass n.")
        return self._forwards[0].tag.n if n is None else n
