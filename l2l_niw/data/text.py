"""Texts and their classes as few-shot tasks: CLINC150's intents, or any table of texts and labels."""

import csv
import json
import lzma
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Union

import numpy as np
import torch
from torch import Tensor

from l2l_niw.data.images import data_root
from l2l_niw.data.tasksets import ClassTaskset
from l2l_niw.errors import ArgumentError, DataError
from l2l_niw.utils._checks import check_number, check_seed

OUT_OF_SCOPE = "oos"  # what CLINC150 calls it
SPLITS = ("train", "validation", "test")


class Texts(NamedTuple):
    """
    Texts and their classes.

    * `texts` - All of them.
    * `labels` - Each one's class, by name.
    * `groups` - Each class's group, by name; the same for all where there are none.
    * `unknown` - Texts of no class.
    """

    texts: List[str]
    labels: List[str]
    groups: Dict[str, str]
    unknown: List[str]


def read_csv(
    path: Union[str, Path],
    text: str = "text",
    label: str = "label",
    group: Optional[str] = None,
    unknown: Optional[str] = None,
) -> Texts:
    """
    **Description**

    Texts from a table with a header, of commas, semicolons or tabs.

    **Arguments**

    * **path** (str) - Of the file, in UTF-8.
    * **text, label** (str, *optional*, default='text', 'label') - Names of the columns.
    * **group** (str, *optional*, default=None) - Name of a column with a group for every class, such as its domain.
    * **unknown** (str, *optional*, default=None) - A label whose texts are of no class.

    **Example**

    ~~~python
    texts = read_csv('questions.csv', text='question', label='intent', unknown='other')
    ~~~
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"path: there is no file {path}.")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"path: {path} is not in UTF-8: {error}. Save it anew in that encoding.") from error
    header = content.partition("\n")[0]
    rows = csv.DictReader(content.splitlines(keepends=True), delimiter=max(",;\t", key=header.count))
    columns = [name for name in (text, label, group) if name is not None]
    missing = [name for name in columns if name not in (rows.fieldnames or ())]
    if missing:
        raise ArgumentError(
            f"{path} has no column {', '.join(missing)}; its header is {', '.join(rows.fieldnames or ())}. Name the "
            "columns by text=, label= and group=."
        )
    found = Texts([], [], {}, [])
    for row in rows:
        values = [(row[name] or "").strip() for name in columns]
        if not all(values):
            raise ArgumentError(f"{path}, line {rows.line_num}: {columns[values.index('')]} is empty.")
        if values[1] == unknown:
            found.unknown.append(values[0])
            continue
        found.texts.append(values[0])
        found.labels.append(values[1])
        own = values[2] if group is not None else ""
        if found.groups.setdefault(values[1], own) != own:
            raise ArgumentError(
                f"{path}, line {rows.line_num}: {label} {values[1]} has {group} {own}, and "
                f"{found.groups[values[1]]} in a line before."
            )
    if not found.texts:
        raise DataError(f"{path} has no texts with a label.")
    return found


def clinc150(root: Union[str, Path, None] = None) -> Texts:
    """
    **Description**

    CLINC150: 150 intents of 10 domains, 150 texts each, and 1,200 that are out of scope.

    **Arguments**

    * **root** (str, *optional*, default=None) - The folder that has clinc150/data_full.json, or .json.xz, and
        clinc150/domains.json; what the variable L2L_NIW_DATA says by default.

    **References**

    1. Larson et al. 2019. "An Evaluation Dataset for Intent Classification and Out-of-Scope Prediction." EMNLP.
    """
    folder = data_root(root) / "clinc150"
    plain, packed, domains = folder / "data_full.json", folder / "data_full.json.xz", folder / "domains.json"
    path = plain if plain.is_file() else packed
    if not path.is_file() or not domains.is_file():
        raise DataError(
            f"No CLINC150: looked for {plain} or {packed.name}, and {domains.name}. Get data_full.json and "
            f"domains.json from github.com/clinc/oos-eval into {folder}."
        )
    try:
        with lzma.open(path, "rt") if path == packed else path.open() as file:
            data: Dict[str, Any] = json.load(file)
        groups = {intent: domain for domain, own in json.loads(domains.read_text()).items() for intent in own}
        pairs = [pair for name in ("train", "val", "test") for pair in data[name]]
        unknown = [text for name in ("train", "val", "test") for text, _ in data[f"{OUT_OF_SCOPE}_{name}"]]
        labels = [label for _, label in pairs]
        return Texts([text for text, _ in pairs], labels, {label: groups[label] for label in labels}, unknown)
    except (ValueError, KeyError, TypeError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} and {domains.name} cannot be read: {error!r}. Get them anew.") from error


class TextTasksets(NamedTuple):
    """The three splits, no class in two of them, and ids of texts of no class, for validation and for the test."""

    train: ClassTaskset
    validation: ClassTaskset
    test: ClassTaskset
    validation_unknown: Tensor
    test_unknown: Tensor


def get_text_tasksets(
    texts: Texts,
    tokenise: Callable[[List[str]], Tensor],
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
    train_ways: Optional[int] = None,
    train_queries: Optional[int] = None,
    one_group: bool = False,
    num_tasks: int = -1,
    test_tasks: int = 1000,
    seed: int = 0,
) -> TextTasksets:
    """
    **Description**

    Texts as episodes. They are tokenised once. A third of the classes each is for training, validation and test, and a
    third of the texts of no class for validation, the others for the test, dealt out once and for all. Validation and
    test tasks do not depend on the seed.

    **Arguments**

    * **texts** (Texts) - From `clinc150` or `read_csv`.
    * **tokenise** (callable) - From a list of texts to ids, (n, tokens), as `text_blocks` returns it.
    * **ways, shots, queries** (int) - Classes per task, and texts of a class in support and query.
    * **train_ways, train_queries** (int, *optional*, default=None) - Of training tasks, where they differ.
    * **one_group** (bool, *optional*, default=False) - Whether a task's classes are of one group. Then whole groups are
        dealt out, rather than classes.
    * **num_tasks** (int, *optional*, default=-1) - Training tasks; -1 for no end.
    * **test_tasks** (int, *optional*, default=1000) - Tasks of the validation and of the test.
    * **seed** (int, *optional*, default=0) - Of the training tasks.

    **Example**

    ~~~python
    blocks, tokenise = text_blocks()
    tasksets = get_text_tasksets(clinc150('~/data'), tokenise, ways=10, shots=5)
    x, y, x_query, y_query = OpenSetQueries(tasksets.test, unknown=tasksets.test_unknown)[0]
    ~~~
    """
    check_seed(seed)
    check_number("test_tasks", test_tasks, 1, whole=True)
    names = sorted(texts.groups)
    ids = tokenise([*texts.texts, *texts.unknown])
    known, unknown = ids[: len(texts.texts)], ids[len(texts.texts) :]
    parts = sorted(set(texts.groups.values())) if one_group else names
    deal = np.random.default_rng(0).permutation(len(parts))
    split_of = {parts[i]: split for split, own in zip(SPLITS, np.array_split(deal, len(SPLITS))) for i in own}
    group_numbers = {group: number for number, group in enumerate(sorted(set(texts.groups.values())))}

    def taskset(split: str, ways: int, queries: int, tasks: int, seed: int) -> ClassTaskset:
        own = [name for name in names if split_of.get(texts.groups[name] if one_group else name) == split]
        number = {name: i for i, name in enumerate(own)}
        chosen = torch.tensor([i for i, label in enumerate(texts.labels) if label in number], dtype=torch.long)
        labels = torch.tensor([number[texts.labels[i]] for i in chosen], dtype=torch.long)
        groups = [group_numbers[texts.groups[name]] for name in own] if one_group else None
        try:
            if not own:
                raise ArgumentError(
                    f"there are {len(parts)} {'groups' if one_group else 'classes'}, fewer than splits."
                )
            seeds = (SPLITS.index(split), seed)
            return ClassTaskset(known[chosen], labels, ways, shots, queries, tasks, seeds, groups)
        except ArgumentError as error:
            raise ArgumentError(f"texts ({split}): {error}") from error

    train = ways if train_ways is None else train_ways, queries if train_queries is None else train_queries
    mixed = unknown[torch.from_numpy(np.random.default_rng(1).permutation(len(unknown)))]
    third = len(unknown) // 3
    return TextTasksets(
        taskset("train", *train, num_tasks, seed),
        taskset("validation", ways, queries, test_tasks, 0),
        taskset("test", ways, queries, test_tasks, 0),
        mixed[:third],
        mixed[third:],
    )
