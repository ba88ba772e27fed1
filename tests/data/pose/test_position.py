"""Where an object is among others: targets are where it can be seen, and only the support says which it is."""

import pytest
import torch

from l2l_niw.data.pose import PositionTaskset
from l2l_niw.data.pose.views import Views
from l2l_niw.errors import ArgumentError

OBJECTS, VIEWS, OWN = 5, 4, 7


def drawn():
    """Objects of one pixel in their middle, whose brightness says which object and which view it is."""
    shade = torch.zeros(OBJECTS, VIEWS, OWN, OWN, dtype=torch.uint8)
    shade[:, :, OWN // 2, OWN // 2] = (40 * torch.arange(1, OBJECTS + 1).view(-1, 1) + torch.arange(VIEWS)).byte()
    angles = torch.zeros(OBJECTS, VIEWS)
    return Views(shade, 255 * (shade > 0).byte(), angles, angles)


def seen(image):
    """Which objects and views are where in an image: {object: (view, row, column)}."""
    levels = (255 * image[0]).round().int()
    return {int(levels[r, c]) // 40 - 1: (int(levels[r, c]) % 40, int(r), int(c)) for r, c in levels.nonzero().tolist()}


def test_targets_are_the_object_s_centre_and_the_others_change():
    taskset = PositionTaskset(drawn(), size=32, distractors=2, shots=5, queries=10)
    for i in range(20):
        x, y, x_query, y_query = taskset[i]
        own, company, used = taskset.object_of(i), set(), set()
        for image, target in zip(torch.cat([x, x_query]), torch.cat([y, y_query])):
            found = seen(image)
            assert len(found) == 3
            view, row, column = found[own]
            assert target.tolist() == [row, column]
            company.add(frozenset(found) - {own})
            used.add(view)
        assert len(company) > 2  # of 6 pairs
        assert len(used) > 1
        assert x.shape == (5, 1, 32, 32)
        assert len(torch.cat([y, y_query]).unique(dim=0)) > 10


def test_objects_are_anywhere_and_apart():
    taskset = PositionTaskset(drawn(), size=32, distractors=2, shots=1, queries=30)
    places = torch.cat([taskset[i].y_query for i in range(30)])
    assert places.amin(0).tolist() == [OWN // 2] * 2
    assert places.amax(0).tolist() == [31 - OWN // 2] * 2
    assert places.mean(0).tolist() == pytest.approx([15.5, 15.5], abs=0.9)  # 3.5 standard errors
    for image in taskset[0].x_query:
        centres = torch.tensor([place[1:] for place in seen(image).values()]).float()
        assert torch.pdist(centres).min() >= 0.6 * OWN


def test_tasks_have_numbers_and_a_batch_one_number_of_shots():
    one, two = (PositionTaskset(drawn(), size=32, shots=(1, 6), queries=3) for _ in range(2))
    assert torch.equal(one[7].x, two[7].x)
    batch = one.batch(5)
    for k in range(5):
        assert torch.equal(batch.x_query[k], two[k].x_query)
        both = min(batch.x.shape[1], len(two[k].x))
        assert torch.equal(batch.y[k, :both], two[k].y[:both])
    assert not torch.equal(PositionTaskset(drawn(), size=32, seed=1)[7].y_query, two[7].y_query)


def test_alone_in_an_image():
    task = PositionTaskset(drawn(), size=OWN, distractors=0, shots=2)[0]
    assert (task.y == OWN // 2).all()


@pytest.mark.parametrize(("options", "message"), [
    ({"distractors": 5}, "distractors is 5, but there are 5 objects"),
    ({"distractors": -1}, "distractors must be"),
    ({"size": 6}, "size must be"),
    ({"size": 12}, "more than certainly fit: objects of 7 pixels in images of 12"),
    ({"shots": 0}, "shots must be"),
])  # fmt: skip
def test_arguments_are_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        PositionTaskset(drawn(), **{"size": 32, **options})
