"""Whether views tell an azimuth: shapes whose symmetry is known, and whether views can be matched in noise."""

from pathlib import Path

import numpy as np
import pytest

from l2l_niw.data.pose import Mesh, distinctness, furniture, normalised, primitives, rendered, screen
from l2l_niw.data.pose.identifiable import AMBIGUOUS, ANGLES, ELEVATION, SIZE
from l2l_niw.errors import ArgumentError

trimesh = pytest.importorskip("trimesh", reason="needs the extra pose")
pytest.importorskip("embreex", reason="needs the extra pose")
creation = trimesh.creation
SHARED = Path(__file__).parents[4] / "shared" / "data"
AZIMUTHS = np.arange(ANGLES) * 360 / ANGLES


def mesh_of(*shapes, name="shape", category="test"):
    """Shapes that stand on z, with y up."""
    shape = trimesh.util.concatenate(shapes)
    return normalised(Mesh(name, category, np.asarray(shape.vertices)[:, [1, 2, 0]], np.asarray(shape.faces)))


def moved(shape, *shift):
    shape.apply_translation(shift)
    return shape


def views(mesh, shift=0.0):
    return rendered([mesh], AZIMUTHS + shift, np.full(ANGLES, ELEVATION), SIZE).shade[0].numpy()


SYMMETRIC = {
    "sphere": mesh_of(creation.icosphere(subdivisions=3)),
    "cylinder of 24 sides": mesh_of(creation.cylinder(0.5, 2, sections=24)),
    "cylinder of 29 sides": mesh_of(creation.cylinder(0.5, 2, sections=29)),
    "cone": mesh_of(creation.cone(0.5, 1.5, sections=37)),
    "box, by 180 degrees": mesh_of(creation.box((1.0, 0.5, 1.5))),
    "box, by 90 degrees": mesh_of(creation.box((1.0, 1.0, 2.0))),
    "prism, by 72 degrees": mesh_of(creation.cylinder(0.5, 1, sections=5)),
    "prism, by 51.4 degrees": mesh_of(creation.cylinder(0.5, 1, sections=7)),
    "prism, by 45 degrees": mesh_of(creation.cylinder(0.5, 1, sections=8)),
    "two posts": mesh_of(moved(creation.box((0.2, 0.2, 1)), 1, 0, 0), moved(creation.box((0.2, 0.2, 1)), -1, 0, 0)),
}
ASYMMETRIC = {mesh.name: mesh for mesh in primitives(2)}


def recovered(mesh, noise=0.5):
    """The part of views, seen again in noise, whose nearest view is the right one or its neighbour."""
    clean = views(mesh).astype(float) / 255
    random = np.random.default_rng(0)
    seen = clean + noise * random.standard_normal(clean.shape)
    nearest = ((seen[:, None] - clean[None]) ** 2).sum((-2, -1)).argmin(1)
    off = (nearest - np.arange(ANGLES) + ANGLES // 2) % ANGLES - ANGLES // 2
    return (np.abs(off) <= 1).mean()


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_shapes_are_far_below_the_threshold(name):
    assert distinctness(views(SYMMETRIC[name])) < 0.02
    assert recovered(SYMMETRIC[name]) <= 0.5


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_shapes_without_a_symmetry_are_far_above_it(name):
    assert distinctness(views(ASYMMETRIC[name])) > 2 * AMBIGUOUS
    assert recovered(ASYMMETRIC[name]) == 1


def test_the_threshold_is_where_views_can_be_matched_in_noise():
    """A mug with a growing handle: above the threshold 19 of 20 azimuths are recovered, below it fewer."""
    found, rates = [], []
    for s in (0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.8):
        handle = moved(creation.box((s, 0.2 * s, s)), 0.5 + s / 2, 0, 0)
        mug = mesh_of(creation.cylinder(0.5, 1.3, sections=48), handle)
        found.append(distinctness(views(mug)))
        rates.append(recovered(mug))
    assert found == sorted(found)
    assert [value >= AMBIGUOUS for value in found] == [rate >= 0.95 for rate in rates] == 4 * [False] + 3 * [True]


def test_it_is_a_ratio_that_neither_brightness_nor_a_first_azimuth_changes():
    mesh = ASYMMETRIC["chair 0"]
    whole = distinctness(views(mesh))
    assert distinctness(views(mesh) // 2) == pytest.approx(whole, rel=0.02)
    assert distinctness(np.roll(views(mesh), 7, 0)) == pytest.approx(whole, rel=1e-5)
    assert distinctness(np.pad(views(mesh), ((0, 0), (16, 16), (16, 16)))) == pytest.approx(whole, rel=1e-5)
    assert distinctness(views(mesh, shift=7.5)) == pytest.approx(whole, rel=0.1)


def test_the_ratio_by_hand():
    """Four views: a turn by 90 degrees moves light of 2, 2, 4, 4 of 3 a view, one by 180 degrees of 4 each."""
    images = np.array([[[3.0, 0, 0]], [[2, 1, 0]], [[1, 2, 0]], [[0, 0, 3]]])
    quarter = (2 + 2 + 6 + 6) / 12
    half = (4 + 6 + 4 + 6) / 12
    assert distinctness(images) == pytest.approx(min(quarter, half))


def test_what_is_left_out_is_counted_and_a_copy_is_one():
    one, two = ASYMMETRIC["car 0"], ASYMMETRIC["car 1"]
    copy = one._replace(name="copy", vertices=one.vertices * 0.999)
    meshes = [SYMMETRIC["cone"]._replace(category="car"), one, two, copy, SYMMETRIC["sphere"]]
    found = screen(meshes)
    assert [mesh.name for mesh in found.kept] == ["car 0", "car 1"]
    assert [mesh.name for mesh in found.copies] == ["copy"]
    assert found.counts() == {"car": (4, 1, 1, 2), "test": (1, 1, 0, 0)}
    assert screen(meshes, ambiguous=2.1).kept == []
    assert len(screen(meshes, ambiguous=0, alike=0).kept) == 5


def test_what_has_no_distinctness_is_named():
    with pytest.raises(ArgumentError, match="all black"):
        distinctness(np.zeros((24, 8, 8)))
    with pytest.raises(ArgumentError, match="has 1 views"):
        distinctness(np.ones((1, 8, 8)))
    with pytest.raises(ArgumentError, match="ambiguous must be"):
        screen([], ambiguous=-1)
    with pytest.raises(ArgumentError, match="meshes is empty"):
        screen([])


@pytest.mark.skipif(not (SHARED / "furniture").is_dir(), reason="needs the furniture in ../shared/data")
def test_furniture_by_name():
    """Ten pieces whose symmetry their names say."""
    first = {}
    for mesh in furniture(SHARED):
        first.setdefault(mesh.name, mesh)
    chosen = [
        "Cocktail glass",
        "Vase",
        "Porch column",
        "Tatami",
        "Round table",
        "Chair",
        "Sofa",
        "Cat",
        "Bus",
        "Bicycle",
    ]
    found = screen([first[name] for name in chosen])
    assert [mesh.name for mesh in found.ambiguous] == chosen[:5]
    assert [mesh.name for mesh in found.kept] == chosen[5:]
