"""The example of examples/pose runs on small views of primitives, and says what it needs."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "pose"
sys.path.insert(0, str(FOLDER))

import niw_pose

from l2l_niw.errors import DataError


@pytest.mark.parametrize("head", niw_pose.HEADS)
def test_it_trains_and_scores_with_and_without_niw(head, monkeypatch, capsys):
    monkeypatch.setattr(niw_pose, "primitives", lambda _: niw_pose_primitives(5))
    small = {"shots": 4, "queries": 3, "size": 16, "num_iterations": 2, "quick": True}
    results = niw_pose.main(head, **small)
    assert set(results) == {(method, name) for method in ("plain", "niw") for name in ("test", "cross")}
    assert all(math.isfinite(found["nll"]) and 0 <= found["degrees"] <= 180 for found in results.values())
    assert capsys.readouterr().out.count("degrees, NLL") == 4
    assert niw_pose.main(head, ("niw",), **small) == {key: own for key, own in results.items() if key[0] == "niw"}


niw_pose_primitives = niw_pose.primitives


def test_without_furniture_it_says_so(tmp_path):
    with pytest.raises(DataError, match="or take `primitives\\(\\)`"):
        niw_pose.main(data=tmp_path)


@pytest.mark.slow
def test_it_helps():
    line = [sys.executable, str(FOLDER / "niw_pose.py"), "--help"]
    assert "--quick" in subprocess.run(line, capture_output=True, text=True, check=True).stdout
