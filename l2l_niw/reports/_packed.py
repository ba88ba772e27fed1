"""One file with the raw figures of all runs of a table: JSON lines, or arrays beside them. Same figures, same bytes."""

import io
import json
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence

import numpy as np

from l2l_niw.errors import CheckpointError
from l2l_niw.utils._files import replacing, write

LINES_FILE, ARRAYS_FILE = "results.jsonl", "results.npz"  # in a results folder
REMEDY = "Restore it from git, or delete it and run the benchmark anew."
BEGINNING = (1980, 1, 1, 0, 0, 0)  # a zip file's earliest date, instead of the time of writing
UNREADABLE = (
    OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError,
    SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # what numpy and zipfile raise of files that are cut off, damaged or something else  # fmt: skip


def write_lines(path: Path, runs: Iterable[Dict[str, Any]]) -> None:
    """One run per line."""
    write(path, "".join(json.dumps(run) + "\n" for run in runs))


def read_lines(path: Path, remedy: str = REMEDY) -> List[Dict[str, Any]]:
    """The runs of a file, none where there is no such file."""
    runs = []
    try:
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
            runs.append(json.loads(line))
            if not isinstance(runs[-1], dict):
                raise ValueError(f"line {number} is no run")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {remedy}") from error
    return runs


def check_keys(path: Path, run: Any, keys: Sequence[str], remedy: str) -> None:
    """Raises where a run that was read from a file is no dict with these keys."""
    missing = [key for key in keys if key not in run] if isinstance(run, dict) else list(keys)
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}. {remedy}")


def check_numbers(path: Path, run: Any, keys: Sequence[str], remedy: str) -> None:
    """As `check_keys`, for values that must be numbers."""
    check_keys(path, run, keys, remedy)
    for key in keys:
        if not isinstance(run[key], (int, float)):
            raise CheckpointError(f"{path}: {key} must be a number, and is {run[key]!r}. {remedy}")


def write_arrays(path: Path, arrays: Dict[str, np.ndarray]) -> None:
    """An npz file, like `np.savez_compressed`."""
    with replacing(path) as whole, zipfile.ZipFile(whole, "w") as file:
        for name, array in arrays.items():
            data, member = io.BytesIO(), zipfile.ZipInfo(f"{name}.npy", BEGINNING)
            member.create_system = 3  # Unix, on every system
            np.lib.format.write_array(data, array, allow_pickle=False)
            file.writestr(member, data.getvalue(), zipfile.ZIP_DEFLATED, 9)


def read_arrays(path: Path, names: Sequence[str], remedy: str = REMEDY) -> Dict[str, np.ndarray]:
    """These arrays of an npz file; others may be there too."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {remedy}") from error
