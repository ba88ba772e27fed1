"""Sine-Line as learn2learn and torchmeta hand out tasks."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from l2l_niw.data._numbered import NumberedTasks
from l2l_niw.data.sine_line import SineLine
from l2l_niw.errors import ArgumentError, ExtraError
from l2l_niw.utils._checks import check_seed

if TYPE_CHECKING:
    from learn2learn.vision.benchmarks import BenchmarkTasksets

SPLITS = ("train", "validation", "test")


class SineLineTaskset(NumberedTasks):
    """
    **Description**

    Tasks as a learn2learn `Taskset` gives them: `sample()` and `taskset[i]` are (inputs, targets) of one task, its
    support first. Task i is the same whenever it is asked for.

    **Arguments**

    * **family** (SineLine) - Where tasks come from.
    * **num_tasks** (int, *optional*, default=-1) - How many there are; -1 for no end.
    * **seed** (int, *optional*, default=0) - Of the tasks, and of the order in which `sample` takes them.
    * **split** (str, *optional*, default='train') - Or 'validation', 'test'. No task is in two of them.
    """

    def __init__(self, family: SineLine, num_tasks: int = -1, seed: int = 0, split: str = "train"):
        super().__init__(num_tasks)
        check_seed(seed)
        if split not in SPLITS:
            raise ArgumentError(f"split must be one of {SPLITS}, got {split!r}.")
        self.family = family
        self._split, self._first = SPLITS.index(split), int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._order = torch.Generator().manual_seed(seed)

    def task(self, i: int) -> Tuple[Tensor, Tensor]:
        """Inputs and targets of task i, (points, 1) each, the support first."""
        number = 3 * ((self._first + i) % 2**30) + self._split  # of 32 bits, which are all that torch's seeds have
        tasks = self.family.sample(1, torch.Generator().manual_seed(number))
        x, y, x_query, y_query = (t[0] for t in tasks)
        return torch.cat([x, x_query]), torch.cat([y, y_query])

    def sample(self) -> Tuple[Tensor, Tensor]:
        """Inputs and targets of a task drawn at random, (points, 1) each, the support first."""
        end = 2**30 if self.num_tasks < 0 else self.num_tasks
        return self[int(torch.randint(end, (), generator=self._order))]


def sine_line_tasksets(
    family: Optional[SineLine] = None, num_tasks: int = -1, test_tasks: int = 20_000, seed: int = 0
) -> "BenchmarkTasksets":
    """
    **Description**

    `train`, `validation` and `test` tasks of Sine-Line, as `l2l.vision.benchmarks.get_tasksets` gives them for images.

    **Arguments**

    * **family** (SineLine, *optional*, default=None) - Defaults to `SineLine()`.
    * **num_tasks** (int, *optional*, default=-1) - Of training; -1 for no end.
    * **test_tasks** (int, *optional*, default=20000) - Of validation, and of the test.
    * **seed** (int, *optional*, default=0) - Of all three.

    **Example**

    ~~~python
    tasksets = sine_line_tasksets()
    x, y = tasksets.train.sample()
    learner.adapt(F.mse_loss(learner(x[:5]), y[:5]))
    F.mse_loss(learner(x[5:]), y[5:]).backward()
    ~~~
    """
    from learn2learn.vision.benchmarks import BenchmarkTasksets

    family, counts = family or SineLine(), (num_tasks, test_tasks, test_tasks)
    return BenchmarkTasksets(*(SineLineTaskset(family, n, seed, split) for n, split in zip(counts, SPLITS)))


def torchmeta_sine_line(
    family: Optional[SineLine] = None, num_tasks: int = 1_000_000, seed: int = 0, split: str = "train"
) -> Any:
    """
    **Description**

    The same tasks as a torchmeta dataset, for `torchmeta.utils.data.BatchMetaDataLoader`: a batch is a dict of
    'train', the support, and 'test', the query, inputs and targets each.

    **Arguments**

    * **family** (SineLine, *optional*, default=None) - Defaults to `SineLine()`.
    * **num_tasks** (int, *optional*, default=1000000) - torchmeta wants to know.
    * **seed, split** - As in `SineLineTaskset`.

    **Example**

    ~~~python
    loader = BatchMetaDataLoader(torchmeta_sine_line(), batch_size=20)
    (x, y), (x_query, y_query) = (next(iter(loader))[part] for part in ('train', 'test'))
    ~~~
    """
    taskset = SineLineTaskset(family or SineLine(), num_tasks, seed, split)
    shots, points = taskset.family.shots, taskset.family.points
    meta_dataset: Any
    meta_dataset, subset = torchmeta_classes()

    class SineLineMetaDataset(meta_dataset):
        def __len__(self) -> int:
            return num_tasks

        def __getitem__(self, index: int) -> OrderedDict:
            task: Any = torch.utils.data.TensorDataset(*taskset[index])
            task.index, task.num_classes = index, None
            task.target_transform_append = lambda transform: None
            parts = {"train": range(shots), "test": range(shots, points)}
            return OrderedDict((name, subset(task, list(rows))) for name, rows in parts.items())

    return SineLineMetaDataset(meta_split={"validation": "val"}.get(split, split))


def torchmeta_classes() -> tuple:
    """torchmeta's dataset and subset, mended for a torchvision and a torch that are newer than it."""
    import torchvision.datasets.utils as downloads

    for name in ("_get_confirm_token", "_save_response_content"):  # it imports them, for downloads that are not ours
        if not hasattr(downloads, name):
            setattr(downloads, name, None)
    try:
        from torchmeta.utils.data import MetaDataset
        from torchmeta.utils.data.task import SubsetTask
    except ImportError as error:
        raise ExtraError(
            "torchmeta_sine_line needs torchmeta, which asks for an old torch, so that it is installed by itself: "
            "pip install --no-deps torchmeta==1.8.0, then pip install h5py ordered-set."
        ) from error
    if "__getitems__" not in vars(SubsetTask):  # torch's Subset has one that goes around the task's own
        SubsetTask.__getitems__ = lambda self, indices: [self[i] for i in indices]
    return MetaDataset, SubsetTask
