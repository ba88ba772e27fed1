"""What is installed, and what the repository says of itself."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import l2l_niw

ROOT = Path(__file__).parents[1]


def layers():
    """import-linter's, from the top; a set for those of one height."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [{name.strip() for name in layer.split("|")} for layer in contracts[0]["layers"]]


def test_every_module_has_a_layer():
    found = {p.stem for p in (ROOT / "l2l_niw").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert found - {"__init__", "__main__"} == set().union(*layers())


def test_contributing_lists_the_layers_that_are_checked():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| `l2l_niw/")]
    found = [set(re.findall(r"`l2l_niw/(\w+)(?:\.py|/)`", row.split("|")[1])) for row in rows]
    assert found == layers()


def test_contributing_names_files_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:l2l_niw|tests|benchmarks|examples|docs)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path


def test_readme_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_version_is_one():
    assert f"version: {l2l_niw.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {l2l_niw.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_a_wheel_works_from_another_folder(tmp_path):
    """Built from a copy of what git holds, installed beside the packages of this environment, used elsewhere."""
    source, target = tmp_path / "source", tmp_path / "target"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    for name in ("setup.py", "pyproject.toml", "README.md"):  # as they are now
        (source / name).write_text((ROOT / name).read_text())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("l2l_niw-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    code = "import l2l_niw.vision, l2l_niw.heads; print(l2l_niw.__file__, l2l_niw.__version__)"
    options = {"cwd": tmp_path, "env": {"PYTHONPATH": str(target), "PATH": ""}, "capture_output": True, "text": True}
    found = subprocess.run([sys.executable, "-c", code], **options, check=True).stdout.split()
    assert found == [str(target / "l2l_niw" / "__init__.py"), l2l_niw.__version__]
    assert (target / "l2l_niw" / "py.typed").exists()
    command = target / "bin" / "l2l-niw"
    assert "train" in subprocess.run([sys.executable, str(command), "--help"], **options, check=True).stdout
