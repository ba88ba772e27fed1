"""Whether two forwards got the same inputs: every kind of input, every way to write to it."""

import collections
import copy
import dataclasses
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from l2l_niw.utils._inputs import Inputs


@dataclasses.dataclass
class Batch:
    x: Any
    name: str = "batch"


class Pair(NamedTuple):
    x: Any
    y: Any


class Loader:
    def __init__(self, x):
        self.x = x


class Opaque:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def nested_tensor(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        return torch.nested.nested_tensor([x[:2], x[2:]])


KINDS = {
    "tensor": lambda x: x,
    "numpy": lambda x: x.numpy().copy(),
    "dict": lambda x: {"x": x, "mask": None},
    "UserDict": lambda x: collections.UserDict(x=x),
    "list": lambda x: [list(x), 3],
    "named tuple": lambda x: Pair(x, 2.0),
    "dataclass": Batch,
    "object": Loader,
    "object in a list": lambda x: [Loader({"deep": (x,)})],
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "nested": nested_tensor,
    "numbers": lambda x: x.tolist(),
    "text": lambda x: str(x.tolist()),
    "bytes": lambda x: x.numpy().tobytes(),
}
every_kind = pytest.mark.parametrize("pack", KINDS.values(), ids=KINDS)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")


def values():
    return torch.randn(4, 3)


@every_kind
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_equal_inputs_are_the_same_and_others_are_not(pack, by):
    x, other = values(), values()

    def arguments(t):
        return ((pack(t),), {}) if by == "position" else ((), {"batch": pack(t)})

    inputs = Inputs(*arguments(x))
    assert inputs.same_as(*arguments(x)) is True
    assert inputs.same_as(*arguments(x.clone())) is True
    assert inputs.same_as(*arguments(other)) is False
    assert inputs.same_as(*arguments(x)) is True


@every_kind
def test_one_value_that_differs_is_enough(pack):
    x = values()
    inputs = Inputs((pack(x),), {})
    changed = x.clone()
    changed[-1, -1] += 1e-3
    assert inputs.same_as((pack(changed),), {}) is False


@every_kind
def test_inputs_of_another_length_are_others(pack):
    x = values()
    inputs = Inputs((pack(x),), {})
    assert inputs.same_as((pack(x[:3]),), {}) is False
    assert inputs.same_as((pack(torch.cat([x, x])),), {}) is False


def test_the_same_values_in_another_shape_dtype_or_kind_are_others():
    x = torch.arange(12).reshape(4, 3)
    inputs = Inputs((x,), {})
    others = [x.reshape(3, 4), x.flatten(), x.double(), x.int(), x.numpy(), x.tolist(), [x], {"x": x}, x.to_sparse()]
    for other in [*others, None]:
        assert inputs.same_as((other,), {}) is False
    array = Inputs((x.numpy(),), {})
    for other in [x.numpy().astype("int32"), x.numpy().astype("float64"), x.numpy().reshape(3, 4), x, x.tolist()]:
        assert array.same_as((other,), {}) is False
    for number, other in [(1, 1.0), (1, True), (0, None), ("1", 1), (b"1", "1")]:
        assert Inputs((number,), {}).same_as((other,), {}) is False


def test_sparse_tensors_of_other_places_or_shapes_are_others():
    def sparse(columns, size=5):
        dense = torch.zeros(2, size)
        dense[0, columns[0]], dense[1, columns[1]] = 1.0, 2.0
        return dense.to_sparse()

    inputs = Inputs((sparse([0, 1]),), {})
    assert inputs.same_as((sparse([0, 1]),), {}) is True
    assert inputs.same_as((sparse([0, 2]),), {}) is False
    assert inputs.same_as((sparse([0, 1], 6),), {}) is False


def test_another_argument_makes_another_input():
    x = values()
    inputs = Inputs((x,), {"training": True})
    assert inputs.same_as((x,), {"training": True}) is True
    assert inputs.same_as((x,), {"training": False}) is False
    assert inputs.same_as((x,), {}) is False
    assert inputs.same_as((x, x), {"training": True}) is False
    assert inputs.same_as((), {"x": x, "training": True}) is False
    assert Inputs((Batch(x, "a"),), {}).same_as((Batch(x, "b"),), {}) is False


WRITES = {
    "in place": lambda x: x.add_(1.0),
    "data": lambda x: x.data.copy_(x + 1.0),
    "set data": lambda x: setattr(x, "data", x + 1.0),
    "numpy": lambda x: np.add(x.numpy(), 1.0, out=x.numpy()),
    "alias": lambda x: x.view(-1)[3].add_(1.0),
    "detached alias": lambda x: x.detach()[0].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("pack", [lambda x: x, lambda x: [{"x": x}], Batch, Loader], ids=["bare", "list", "data", "of"])
def test_a_write_is_seen_by_whatever_way(pack, write):
    x = values()
    packed, before = pack(x), x.clone()
    inputs = Inputs((packed,), {})
    write(x)
    assert inputs.same_as((packed,), {}) is False
    assert inputs.same_as((pack(before),), {}) is True


def test_a_numpy_buffer_that_is_filled_again_is_seen():
    buffer = np.ones((4, 3))
    inputs = Inputs((buffer,), {})
    buffer[:] = 2.0
    assert inputs.same_as((buffer,), {}) is False
    buffer[:] = 1.0
    assert inputs.same_as((buffer,), {}) is True


def test_a_container_that_is_changed_is_seen():
    x, other = values(), values()
    for container, change in [
        ({"x": x}, lambda c: c.update(x=other)),
        ([x], lambda c: c.append(x)),
        (Loader(x), lambda c: setattr(c, "x", other)),
        (Loader(x), lambda c: setattr(c, "more", 1)),
        (Batch(x), lambda c: setattr(c, "name", "other")),
    ]:
        inputs = Inputs((container,), {})
        assert inputs.same_as((container,), {}) is True
        change(container)
        assert inputs.same_as((container,), {}) is False


def test_what_cannot_be_compared_is_said_unless_something_else_differs():
    x, other, opaque = values(), values(), Opaque(values())
    inputs = Inputs((x, opaque), {})
    assert inputs.same_as((x, opaque), {}) is None
    assert inputs.same_as((other, opaque), {}) is False
    assert inputs.same_as((x, copy.copy(opaque)), {}) is None
    objects = np.array([x, None], dtype=object)
    assert Inputs((objects,), {}).same_as((objects,), {}) is None


def test_an_object_that_refers_to_itself_is_compared_or_said_not_to_be():
    batch = Loader(values())
    batch.owner = batch
    assert Inputs((batch,), {}).same_as((batch,), {}) is not False


def test_numpy_s_numbers_are_compared():
    for kind in (np.int64, np.float32, np.bool_):
        number, other = kind(1), kind(0)
        assert Inputs((number,), {}).same_as((number,), {}) is True
        assert Inputs((number,), {}).same_as((other,), {}) is False


def test_no_inputs_at_all_cannot_be_compared():
    assert Inputs((), {}).same_as((), {}) is None


def test_nan_is_no_input_that_could_be_the_same():
    x = torch.tensor([1.0, float("nan")])
    assert Inputs((x,), {}).same_as((x,), {}) is False


def test_inputs_with_a_graph_are_compared_by_value_and_not_held():
    x = values().requires_grad_()
    hidden = x * 2
    inputs = Inputs((hidden,), {})
    assert inputs.same_as((hidden.detach(),), {}) is True
    assert not inputs._snapshot[1][0][1][0].requires_grad


def test_tensors_of_inference_mode_are_compared():
    with torch.inference_mode():
        x = values()
        inputs = Inputs((x,), {})
        assert inputs.same_as((x,), {}) is True
        x.add_(1.0)
        assert inputs.same_as((x,), {}) is False


def test_tensors_on_a_device_are_the_same_if_they_were_not_written_to():
    """The meta device has no values, so nothing can be compared or copied there."""
    x = torch.empty(4, 3, device="meta")
    inputs = Inputs((x,), {})
    assert inputs.same_as((x,), {}) is True
    x.add_(1.0)
    assert inputs.same_as((x,), {}) is False
    assert Inputs((x,), {}).same_as((x[:2],), {}) is False
    assert Inputs((x,), {}).same_as((values(),), {}) is False
