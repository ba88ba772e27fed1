"""The process itself: where it runs, its memory, and Ctrl-C."""

import math
import os
import platform
import re
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator

import torch


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def peak_memory() -> float:
    """The peak resident memory in MB, where the system tells it, else nan. (getrusage's also counts a parent's.)"""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return math.nan if found is None else int(found[1]) / 1024


@contextmanager
def postponed_interrupt() -> Iterator[Dict[str, bool]]:
    """Ctrl-C waits for the end of the iteration; a second one does not. (Signals are the main thread's.)"""
    asked = {"stop": False}
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        asked["stop"] = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
