"""The tasks of a run: images or texts, or what the frozen part of a transformer computes of them."""

from typing import Any, Callable

from l2l_niw.data import MappedTaskset, Tasksets, clinc150, get_tasksets, get_text_tasksets
from l2l_niw.data._numbered import NumberedEpisodes
from l2l_niw.vision.config import TEXTS, Config
from l2l_niw.vision.transformers import TRANSFORMERS, Root, frozen_features


def raw_tasksets(config: Config, root: Root, download: bool = False) -> Any:
    """Training, validation and test tasks of images, or of token ids, with what is of no class besides."""
    shape: Any = {"ways": config.ways, "shots": config.shots, "queries": config.queries}
    count = max(config.test_tasks, config.validation_tasks, config.scaling_tasks)
    shape |= {"train_queries": config.train_queries, "test_tasks": count, "seed": config.seed}
    if config.dataset in TEXTS:
        tokeniser: Any = TRANSFORMERS[config.backbone].tokeniser
        return get_text_tasksets(clinc150(root), tokeniser(), one_group=TEXTS[config.dataset], **shape)
    return get_tasksets(config.dataset, root=root, download=download, **shape)


def as_inputs(config: Config, root: Root) -> Callable[[NumberedEpisodes], NumberedEpisodes]:
    """From a taskset of images or token ids to one of what the backbone takes."""
    if config.backbone not in TRANSFORMERS:
        return lambda taskset: taskset
    features = frozen_features(config, root)
    return lambda taskset: MappedTaskset(taskset, features)


def tasksets_of(config: Config, root: Root, download: bool = False) -> Tasksets:
    """The training, validation and test tasks of a config, as its backbone takes them."""
    tasksets, inputs = raw_tasksets(config, root, download), as_inputs(config, root)
    splits: Any = tuple(map(inputs, tasksets[:3]))
    return Tasksets(*splits)
