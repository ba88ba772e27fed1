"""A trained run on episodes that are not like those it was trained for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Union

import torch
from torch import Tensor

from l2l_niw.data import CorruptedQueries, ImageTaskset, OpenSetQueries
from l2l_niw.data._numbered import NumberedEpisodes
from l2l_niw.data.images import Images, load_images
from l2l_niw.errors import ArgumentError, require
from l2l_niw.metrics import calibration, conformal, open_set, selective
from l2l_niw.utils._files import folder_of, locked, write
from l2l_niw.vision.config import TEXTS, Config
from l2l_niw.vision.runs import fitted_temperature, predictions, trained
from l2l_niw.vision.tasks import as_inputs, raw_tasksets

TASKS = 200  # of each shift
LEVEL = 0.9  # of prediction sets
OTHER = {"cifarfs": "fc100", "fc100": "cifarfs"}  # where other classes are taken from
CORRUPTIONS = [(kind, severity) for kind in ("noise", "blur", "contrast") for severity in (1, 3, 5)]
Shift = Callable[[Config, Any, Union[str, Path, None]], NumberedEpisodes]


def other_classes(config: Config, tasks: Any, root: Union[str, Path, None]) -> NumberedEpisodes:
    """Test tasks of the other data set, of classes that training does not have: not even half of their images."""
    if config.dataset not in OTHER:
        raise ArgumentError(f"dataset: {config.dataset} has no other set of classes; one of {', '.join(OTHER)} has.")
    pixels, labels = raw_tasksets(replace(config, dataset=OTHER[config.dataset]), root).test.images
    seen = set(map(_digest, load_images(config.dataset, "train", root).pixels))
    classes = [pixels[labels == c] for c in labels.unique()]
    new = [own for own in classes if sum(_digest(image) in seen for image in own) < len(own) / 2]
    if len(new) < tasks.ways:
        raise ArgumentError(f"dataset: {OTHER[config.dataset]} has {len(new)} new classes, and ways is {tasks.ways}.")
    images = Images(torch.cat(new), torch.arange(len(new)).repeat_interleave(torch.tensor([len(own) for own in new])))
    return ImageTaskset(images, tasks.ways, tasks.shots, tasks.queries, tasks.num_tasks, tasks.rotate, tasks.seed)


def _digest(image: Tensor) -> int:
    return hash(image.numpy().tobytes())


def out_of_scope(config: Config, tasks: Any, root: Union[str, Path, None]) -> NumberedEpisodes:
    """Test tasks with as many texts of no class in their query, or as there are."""
    unknown = raw_tasksets(config, root).test_unknown
    return OpenSetQueries(tasks, queries=min(config.queries, len(unknown) // config.ways), unknown=unknown)


SHIFTS: Dict[str, Shift] = {
    "in domain": lambda config, tasks, root: tasks,
    **{
        f"{kind} {severity}": lambda config, tasks, root, own=(kind, severity): CorruptedQueries(tasks, *own)  # type: ignore[misc]
        for kind, severity in CORRUPTIONS
    },
    "other classes": other_classes,
    "more ways": lambda config, tasks, root: tasks.with_shape(ways=2 * config.ways),
    "more shots": lambda config, tasks, root: tasks.with_shape(shots=5 * config.shots),
    "open set": lambda config, tasks, root: OpenSetQueries(tasks),
}
OF_TEXTS: Dict[str, Shift] = {"in domain": SHIFTS["in domain"], "open set": out_of_scope}
FIXED_WAYS = "more ways"  # what a linear head has no outputs for


def shift_scores(found: Tensor, y: Tensor, temperature: Optional[float], threshold: float) -> Dict[str, Any]:
    """
    **Description**

    Scores of the queries of tasks. Those of unknown classes, whose label is -1, are to be told apart by the largest
    probability, and the others are scored as usual.

    **Arguments**

    * **found** (Tensor) - Probabilities, (tasks, m, ways).
    * **y** (Tensor) - Labels, (tasks, m).
    * **temperature** (float) - That was fitted in domain; None where no temperature was best.
    * **threshold** (float) - Of prediction sets, that was fitted in domain.
    """
    known = y.flatten() >= 0
    every, own = found.flatten(0, 1), y.flatten()[known]
    probabilities = every[known]
    scores: Dict[str, Any] = dict.fromkeys(("ece_ts", "nll_ts", "auroc", "fpr95"))
    scores |= calibration.scores(probabilities, own, temperature)
    sets = conformal.prediction_sets(probabilities, threshold)
    wrong = (probabilities.argmax(-1) != own).double()
    scores |= {
        "aurc": selective.aurc(probabilities.max(-1).values, wrong),
        "coverage": conformal.coverage(sets, own),
        "set_size": conformal.mean_set_size(sets),
    }
    if not known.all():
        doubt = open_set.max_probability(every)
        scores |= {"auroc": open_set.auroc(doubt, ~known), "fpr95": open_set.fpr_at_95(doubt, ~known)}
    return scores


def evaluate_shift(
    folder: Union[str, Path], root: Union[str, Path, None] = None, tasks: int = TASKS
) -> Dict[str, Dict[str, Any]]:
    """
    **Description**

    Scores a trained run under every shift of `SHIFTS`, of texts of `OF_TEXTS`, without further training, and writes
    shift.json. Temperature and threshold of prediction sets are fitted on validation tasks, as they are in domain.

    **Arguments**

    * **folder** (str) - Of the run.
    * **root** (str, *optional*, default=None) - Folder of the data; the variable L2L_NIW_DATA by default.
    * **tasks** (int, *optional*, default=200) - Of each shift.

    **Returns** scores by shift; a classifier with a linear head has none for more ways.
    """
    require("torchmetrics", "vision")  # before all predictions are made, rather than after
    folder = folder_of("folder", folder)
    training = trained(folder)
    method, config = training.method, training.config
    tasksets, inputs = raw_tasksets(config, root), as_inputs(config, root)
    with locked(folder / ".lock"):
        torch.manual_seed(config.seed)
        validation, y = predictions(method, inputs(tasksets.validation), min(tasks, config.scaling_tasks))
        temperature = fitted_temperature(validation, y)
        known = [conformal.label_scores(own, labels) for own, labels in zip(validation, y)]
        threshold, found = conformal.conformal_threshold(known, LEVEL), {}
        for name, shift in (OF_TEXTS if config.dataset in TEXTS else SHIFTS).items():
            if name == FIXED_WAYS and method.fixed_ways:
                continue
            taskset = inputs(shift(config, tasksets.test, root))
            episodes = predictions(method, taskset, min(tasks, config.test_tasks), f"{config.method}: {name}")
            found[name] = shift_scores(*episodes, temperature, threshold)
        write(folder / "shift.json", json.dumps(found, indent=1) + "\n")
    return found
