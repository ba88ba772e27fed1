"""Files that a stop leaves whole, and what to say of those that are not."""

import json
from pathlib import Path
from typing import Any

from l2l_niw.errors import ArgumentError, CheckpointError


def write(path: Path, text: str) -> None:
    """At once, so that a stop leaves the old file or the new one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def write_page(path: Path, text: str) -> None:
    """As `write`, where there is nothing yet, or an earlier page with the same title."""
    title = text.partition("\n")[0]
    if path.exists() and path.read_text().partition("\n")[0] != title:
        raise ArgumentError(f"{path} is there already, and is no report '{title}'. Move it away, or the results.")
    write(path, text)


def read_json(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {remedy}") from error
