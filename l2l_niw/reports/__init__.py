"""Tables and plots of results, from the folder that a benchmark or a comparison has written."""

from pathlib import Path
from typing import Union

from l2l_niw.errors import ArgumentError
from l2l_niw.reports import sine_line


def report(folder: Union[str, Path]) -> str:
    """
    **Description**

    Writes README.md, and the plots it shows, into a results folder, and returns the text.

    **Arguments**

    * **folder** (str) - Of `benchmarks/sine_line.py`, or of a comparison of images.
    """
    folder = Path(folder)
    if any((folder / "runs").glob("*.json")):
        return sine_line.report(folder)
    if any((folder / "runs").glob("*/metrics.json")):
        from l2l_niw.reports import images  # which needs learn2learn's vision

        return images.report(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder.")
    hint = " It is a single run: say where the comparison is." if (folder / "config.json").exists() else ""
    raise ArgumentError(f"{folder} holds no results: there is no tested run in its folder runs.{hint}")


__all__ = ["report"]
