"""The command line itself: its names, its help, and what an import costs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import l2l_niw
from l2l_niw.__main__ import main

EXTRAS = ("timm", "matplotlib", "torchmetrics", "safetensors")


@pytest.mark.parametrize("started_as", ["/usr/bin/l2l-niw", "/somewhere/l2l_niw/__main__.py"])
def test_the_version_and_the_name(started_as, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [started_as])
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"l2l_niw {l2l_niw.__version__}\n" == "l2l_niw 0.2.0\n"
    assert main([]) == 0
    name = "l2l-niw" if "-" in started_as else "python -m l2l_niw"
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {name} [-h]")
    assert f"{name} report comparison" in text


@pytest.mark.parametrize("command", ["train", "test", "compare", "report"])
def test_help_is_in_the_field_s_words(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for phrase in ("networks of a prediction", "looks", "apart", "a task", "twin", "goes on"):
        assert phrase not in text


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


def test_the_package_has_the_same_version():
    assert run(str(Path(__file__).parents[2] / "setup.py"), "--version").split()[-1] == l2l_niw.__version__


@pytest.mark.slow
def test_an_import_prints_nothing_and_loads_no_extra():
    """But for gym: learn2learn/__init__.py imports it."""
    found = subprocess.run([sys.executable, "-c", "import l2l_niw, l2l_niw.cli"], capture_output=True, check=True)
    assert (found.stdout, found.stderr) == (b"", b"")
    assert run("-c", f"import sys, l2l_niw, l2l_niw.cli; print([n for n in {EXTRAS} if n in sys.modules])") == "[]\n"


def test_gym_comes_with_learn2learn_alone():
    package = Path(l2l_niw.__file__).parent
    assert not [path for path in package.rglob("*.py") if re.search(r"^\s*(import|from) gym\b", path.read_text(), re.M)]
