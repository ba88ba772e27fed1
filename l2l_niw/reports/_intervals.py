"""Intervals that need every task's own value, in files too large to keep."""

import hashlib
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from l2l_niw.errors import CheckpointError
from l2l_niw.metrics import Interval
from l2l_niw.utils._files import read_json, write

Kept = Dict[str, Dict[str, Any]]  # {row: {title: interval, "of": digest}}
REMEDY = "Delete it: intervals are computed anew where the tasks' values are."


def read_intervals(path: Path) -> Kept:
    kept = read_json(path, REMEDY) if path.exists() else {}
    rows = kept.values() if isinstance(kept, dict) else [None]
    for row in rows:
        if not isinstance(row, dict) or not all(len(found) == 3 for key, found in row.items() if key != "of"):
            raise CheckpointError(f"{path} holds no intervals. {REMEDY}")
    return kept


def kept_intervals(path: Path, found: Dict[str, Tuple[List[Any], Dict[str, Optional[Interval]]]]) -> Kept:
    """
    **Description**

    What was computed where the tasks' values were at hand is kept, with a digest of the scores that it was computed of,
    and goes when these have changed.

    **Arguments**

    * **path** (Path) - A JSON file.
    * **found** (dict) - Of every row, the scores of all runs that it depends on, and its intervals by title, None where
        the tasks' values are not at hand.
    """
    kept = read_intervals(path)
    for name, (scores, intervals) in found.items():
        digest = hashlib.sha256(json.dumps(scores).encode()).hexdigest()[:16]
        if kept.get(name, {}).get("of") != digest:
            kept[name] = {"of": digest}
        kept[name].update({title: interval for title, interval in intervals.items() if interval is not None})
    write(path, json.dumps(kept, indent=1) + "\n")
    return kept
