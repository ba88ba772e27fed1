import os
import subprocess
import sys
import types

import pytest

from l2l_niw.utils import _torchvision


@pytest.mark.slow
def test_learn2learn_can_be_imported_after_l2l_niw():
    script = "import l2l_niw, learn2learn, torchvision.transforms, torchvision.models; print('imported')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "imported" in result.stdout


def test_a_working_torchvision_is_left_alone(monkeypatch):
    working = types.ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", working)
    monkeypatch.setattr(_torchvision.torch.library, "Library", None)  # any use of it would raise
    assert _torchvision.ensure_torchvision() is False
    assert sys.modules["torchvision"] is working


BROKEN = """
import torch
try:
    torch.ops.torchvision.nms
except AttributeError:
    raise RuntimeError("operator torchvision::nms does not exist")
"""
REPAIR = """
import runpy, sys
ensure = runpy.run_path(sys.argv[1])["ensure_torchvision"]
print(ensure(), ensure(), "torchvision" in sys.modules)
"""


def test_a_torchvision_without_its_operators_is_repaired_once(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN)
    command = [sys.executable, "-c", REPAIR, _torchvision.__file__]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False", "True"]


def test_an_absent_torchvision_is_not_our_concern(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # makes its import raise ImportError
    assert _torchvision.ensure_torchvision() is False
