"""A results page: what was found first, then how."""

from pathlib import Path
from typing import List

from l2l_niw.utils._files import write_page

HOW = "## How"


def page(folder: Path, title: str, results: List[str], setup: str) -> str:
    """
    **Description**

    Writes README.md into a results folder, and returns the text: title, findings, results, then how they were made, and
    a link to trials.md where there is one.

    **Arguments**

    * **folder** (Path) - Of the results. Its notes.md, if any, has the findings, then what to know of how they were
        made under the heading '## How'.
    * **title** (str) - Of the page.
    * **results** (list) - Tables and plots, as paragraphs.
    * **setup** (str) - How they were made.
    """
    notes = folder / "notes.md"
    findings, _, how = (notes.read_text() if notes.exists() else "").partition(HOW)
    text = [f"# {title}", findings.strip(), *results, HOW, setup, how.strip()]
    if (folder / "trials.md").exists():
        text.append("What else was tried, and what came of it: [trials.md](trials.md).")
    whole = "\n\n".join(part for part in text if part)
    write_page(folder / "README.md", whole + "\n")
    return whole
