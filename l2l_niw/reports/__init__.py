"""Tables and plots of results, from the folder that a benchmark or a comparison has written."""

from pathlib import Path
from types import ModuleType
from typing import Union

from l2l_niw.errors import ArgumentError, NIWError
from l2l_niw.reports import sine_line
from l2l_niw.reports._packed import ARRAYS_FILE, LINES_FILE


def report(folder: Union[str, Path]) -> str:
    """
    **Description**

    Writes README.md, and the plots it shows, into a results folder, and returns the text. Runs are read from their
    folders, and those that have none any more from the file that they were packed into.

    **Arguments**

    * **folder** (str) - Of `benchmarks/sine_line.py`, or of a comparison of images.
    """
    module = _reporter(Path(folder))
    try:
        return module.report(Path(folder))
    except OSError as error:
        if isinstance(error, NIWError):
            raise
        raise ArgumentError(f"{folder}: the report cannot be written: {error}. Make it writable.") from error


def pack(folder: Union[str, Path]) -> None:
    """
    **Description**

    Writes everything that a report needs of all runs into one file beside them, results.npz or results.jsonl. The runs'
    folders may be deleted then; only a training that is to resume needs them.

    **Arguments**

    * **folder** (str) - As in `report`.
    """
    _reporter(Path(folder)).pack(Path(folder))


def _reporter(folder: Path) -> ModuleType:
    """The module that knows this kind of results."""
    if any((folder / "runs").glob("*.json")) or (folder / LINES_FILE).exists():
        return sine_line
    if any((folder / "runs").glob("*/metrics.json")) or (folder / ARRAYS_FILE).exists():
        from l2l_niw.reports import images  # which needs learn2learn's vision

        return images
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder.")
    hint = " It is a single run: say where the comparison is." if (folder / "config.json").exists() else ""
    raise ArgumentError(f"{folder} holds no results: there is no tested run in its folder runs.{hint}")


__all__ = ["pack", "report"]
