"""Tasks with numbers."""

from abc import ABC, abstractmethod
from typing import Any, Iterator

import torch

from l2l_niw.data.sine_line import Tasks
from l2l_niw.errors import ArgumentError
from l2l_niw.utils._checks import check_number


class NumberedTasks(ABC):
    """
    **Description**

    What tasksets have in common: `taskset[i]` is task i, the same whenever it is asked for, and `sample()` one task or
    another.

    **Arguments**

    * **num_tasks** (int) - How many there are; -1 for no end.
    """

    def __init__(self, num_tasks: int):
        check_number("num_tasks", num_tasks, -1, whole=True)
        if num_tasks == 0:
            raise ArgumentError("num_tasks must be a number of tasks, or -1 for no end; got 0.")
        self.num_tasks = num_tasks

    @abstractmethod
    def task(self, i: int) -> Any: ...

    @abstractmethod
    def sample(self) -> Any: ...

    def __len__(self) -> int:
        return 1 if self.num_tasks < 0 else self.num_tasks  # learn2learn's own reading of -1

    def __getitem__(self, i: int) -> Any:
        if i < 0 or 0 <= self.num_tasks <= i:
            raise IndexError(f"task {i} of a taskset of {self.num_tasks}.")
        return self.task(i)

    def __iter__(self) -> Iterator[Any]:
        if self.num_tasks < 0:
            while True:
                yield self.sample()
        for i in range(self.num_tasks):
            yield self[i]


class NumberedEpisodes(NumberedTasks):
    """
    **Description**

    Numbered tasks of support and query, which `sample` and `batch` take one after the other.

    **Arguments**

    * **num_tasks** (int) - How many there are; -1 for no end.
    """

    def __init__(self, num_tasks: int):
        super().__init__(num_tasks)
        self.position = 0  # of `sample` and `batch`

    @abstractmethod
    def task(self, i: int) -> Tasks: ...

    def sample(self) -> Tasks:
        """The next task; after the last comes the first again."""
        task = self[self.position]
        self.position = (self.position + 1) % (2**62 if self.num_tasks < 0 else self.num_tasks)
        return task

    def batch(self, n: int) -> Tasks:
        """The next n tasks, stacked: every tensor has a leading dimension n."""
        check_number("n", n, 1, whole=True)
        return Tasks(*(torch.stack(parts) for parts in zip(*(self.sample() for _ in range(n)))))
