"""Imports learn2learn, without the notice of gym's that comes with it."""

import contextlib
import importlib
import io
import sys

NOTICE = ("Gym has been unmaintained", "Please upgrade to Gymnasium", "See the migration guide at https://gymnasium")


def import_learn2learn() -> None:
    """Imports learn2learn. Its `__init__` imports gym, which tells every user on stderr to leave it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            importlib.import_module("learn2learn")
    finally:
        sys.stderr.write("".join(line for line in said.getvalue().splitlines(True) if not line.startswith(NOTICE)))
