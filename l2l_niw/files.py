"""Files that a stop leaves whole."""

from pathlib import Path


def write(path: Path, text: str) -> None:
    """At once, so that a stop leaves the old file or the new one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
