"""Meshes: in the unit sphere, from a file or without one."""

import json
from pathlib import Path

import numpy as np
import pytest

from l2l_niw.data.pose import Mesh, furniture, normalised, primitives
from l2l_niw.errors import ArgumentError, DataError

SHARED = Path(__file__).parents[4] / "shared" / "data"
VERTICES, FACES = (
    np.array([[0, 0, 0], [4, 0, 0], [0, 2, 0], [0, 0, 2], [99, 99, 99.0]]),
    np.array([[0, 1, 2], [0, 1, 3]]),
)


def written(root, shift=0):
    """A small library of furniture: two objects, and the first one again under another name."""
    (root / "furniture").mkdir(exist_ok=True)
    arrays = {}
    for k, vertices in enumerate((VERTICES, VERTICES[:, [1, 0, 2]], VERTICES)):
        arrays |= {f"v{k}": vertices.astype(np.float16), f"f{k}": FACES.astype(np.uint16)}
    np.savez(root / "furniture" / "sh3d_meshes.npz", **arrays)
    meta = [{"id": k, "name": f"chair {k}", "category": "Kitchen"} for k in range(3)]
    (root / "furniture" / "sh3d_meta.json").write_text(json.dumps(meta))


def test_a_mesh_comes_to_the_unit_sphere():
    mesh = normalised(Mesh("m", "c", VERTICES, FACES))
    used = mesh.vertices[:4]
    assert used[:, 1].min() + used[:, 1].max() == pytest.approx(0)
    centroid = used[FACES].mean(1).mean(0)  # both faces are of one size
    assert centroid[[0, 2]] == pytest.approx([0, 0])
    assert np.linalg.norm(used, axis=1).max() == pytest.approx(1)
    sides = np.linalg.norm(used[1:] - used[0], axis=1)
    assert sides / sides[0] == pytest.approx([1, 0.5, 0.5])  # proportions stay


@pytest.mark.parametrize(("change", "message"), [
    ({"vertices": VERTICES[:, :2]}, "vertices must be"),
    ({"vertices": VERTICES * np.nan}, "vertices must be"),
    ({"faces": FACES.astype(float)}, "faces must be whole"),
    ({"faces": FACES[:0]}, "faces must be whole"),
    ({"faces": FACES + 3}, "no vertex: there are 5"),
    ({"faces": FACES - 1}, "no vertex"),
    ({"vertices": 0 * VERTICES}, "all faces are points or lines"),
])  # fmt: skip
def test_what_is_no_mesh_is_named(change, message):
    with pytest.raises(ArgumentError, match=f"chair: .*{message}"):
        normalised(Mesh("chair", "c", VERTICES, FACES)._replace(**change))


def test_primitives_are_the_same_every_time_and_all_different():
    first, second = primitives(3), primitives(3)
    assert len({mesh.category for mesh in first}) == 5
    for one, other in zip(first, second):
        np.testing.assert_array_equal(one.vertices, other.vertices)
        assert np.linalg.norm(one.vertices, axis=1).max() == pytest.approx(1)
    assert len({mesh.vertices.tobytes() for mesh in first}) == 15
    with pytest.raises(ArgumentError, match="each must be"):
        primitives(0)


def test_furniture_is_read_without_copies(tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.setenv("L2L_NIW_DATA", str(tmp_path))
    found = furniture()
    assert [mesh.name for mesh in found] == ["chair 0", "chair 1"]
    np.testing.assert_array_equal(found[0].vertices, normalised(Mesh("m", "c", VERTICES, FACES)).vertices)


def test_furniture_that_is_not_there_or_not_whole_is_named(tmp_path):
    with pytest.raises(DataError, match=r"looked for .*furniture/sh3d_meshes\.npz and sh3d_meta\.json.*primitives"):
        furniture(tmp_path)
    written(tmp_path)
    packed = tmp_path / "furniture" / "sh3d_meshes.npz"
    whole = packed.read_bytes()
    for content in (whole[:-40], whole[: len(whole) // 2], b""):
        packed.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            furniture(tmp_path)
    packed.write_bytes(whole)
    for meta in ("[{]", '[{"id": 7, "name": "a", "category": "b"}]', "[3]"):
        (tmp_path / "furniture" / "sh3d_meta.json").write_text(meta)
        with pytest.raises(DataError, match="cannot be read"):
            furniture(tmp_path)


@pytest.mark.skipif(not (SHARED / "furniture").is_dir(), reason="needs the furniture in ../shared/data")
def test_the_furniture_is_all_there():
    found = furniture(SHARED)
    assert len(found) == 740
    assert len({mesh.category for mesh in found}) == 12
