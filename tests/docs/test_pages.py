"""The pages: their code runs, their figures are those of the results, and they load nothing from the network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
RESULTS = ROOT / "benchmarks" / "results"
SOURCES = {
    "swap": ["swap/README.md"],
    "images": ["images/cifarfs-5-1/README.md"],
    "images_small": [
        f"small_images/{name}/README.md"
        for name in ("cifarfs-5-1", "cifarfs-5-5", "omniglot-20-1", "cifarfs-5-1-rank", "cifarfs-5-5-rank")
    ],
    "sine_line": ["sine_line/README.md", "sine_line_study/README.md"],
    "heads": ["heads.md"],
}
NETWORKS = {
    "MLP 40-40": "sine-line",
    "Conv-4, 84x84": "conv-4",
    "pose encoder, 128x128": "pose",
    "ResNet-18, 84x84": "resnet-18",
    "ResNet-18, 15 queries per way": "resnet-18-15",
    "ViT-small, 80x80": "vit-small",
}


def rows(text):
    """The rows of all tables of a page, as cells."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("page", SOURCES)
def test_figures_of_a_benchmarks_page_are_those_of_its_results(page):
    results = "\n".join((RESULTS / source).read_text() for source in SOURCES[page])
    known = set(re.findall(r"\d[\d,.e+]*\d", results))
    table = "\n".join(" ".join(cells) for cells in rows((ROOT / "docs" / "benchmarks" / f"{page}.md").read_text()))
    figures = set(re.findall(r"\d+\.\d+(?:e\+\d+)?", table))
    assert figures
    assert figures <= known, f"docs/benchmarks/{page}.md has figures that its results lack: update the page."


def test_ratios_of_the_cost_page_are_those_of_its_results():
    text = (RESULTS / "complexity" / "README.md").read_text()
    page = {cells[0]: cells[1:] for cells in rows((ROOT / "docs" / "benchmarks" / "cost.md").read_text())}
    for title, network in NETWORKS.items():
        section = re.search(rf"^## {network}, 1 thread\n(.*?)^## ", text, re.S | re.M).group(1)
        cells = {row[0]: row for row in rows(section)[1:]}
        time = {name: float(row[1].split()[0]) for name, row in cells.items() if row[1]}
        memory = {name: float(row[4]) for name, row in cells.items() if row[4]}
        found = [time["niw-5"] / time[other] for other in ("fo-maml-5", "maml-5")]
        if page[title][2]:
            found += [memory["niw-5"] / memory[other] for other in ("fo-maml-5", "maml-5")]
            found += [memory["niw-50"] / memory["niw-1"]]
        shown = [float(cell) for cell in page[title] if cell]
        assert shown == pytest.approx(found, rel=0.01), f"{title}: update docs/benchmarks/cost.md."


def test_the_code_of_getting_started_runs():
    text = (ROOT / "docs" / "getting-started.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    assert "range(500)" in code
    found = {}
    exec(code.replace("range(500)", "range(2)"), found)  # the blocks go on from each other
    assert found["outputs"].shape == (10, 10, 1)
    assert found["niw"].prior().mean.keys() == found["post"].mean.keys()


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    named = set(re.findall(r"[\w/-]+\.md", navigation))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_results_that_a_page_names_exist(page):
    for path in re.findall(r"`((?:benchmarks|examples|tests|l2l_niw)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_the_network(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)  # and a page for what is not found
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(https?:)?//", page.read_text())
        assert not loaded, page
    assert "Takes one Langevin step" in (tmp_path / "api" / "learner.html").read_text()
