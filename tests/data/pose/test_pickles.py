"""Pickles of arrays are read whoever wrote them; whatever else a file asks for is refused, and nothing is executed."""

import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest

from l2l_niw.data.pose._pickles import Budget, numbers, read_pickle, rows
from l2l_niw.errors import DataError

ARRAYS = {
    "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "doubles": np.linspace(-1, 1, 6).reshape(2, 3),
    "big-endian": np.arange(6, dtype=">i4"),
    "by columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "every other": np.arange(20, dtype=np.int16)[::2],
    "booleans": np.array([True, False]),
    "half": np.arange(3, dtype=np.float16),
    "no axis": np.array(3.0),
    "nothing": np.zeros((2, 0)),
}


def read(tmp_path, content, name="file.pkl"):
    path = tmp_path / name
    path.write_bytes(content)
    return read_pickle(path, "Get it anew.")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_every_protocol_are_read(tmp_path, name, protocol):
    array = ARRAYS[name]
    found = read(tmp_path, pickle.dumps({"a": [array, (array, 3)], "b": array.sum()}, protocol))
    for own in (found["a"][0], found["a"][1][0]):
        assert own.values.dtype == array.dtype
        np.testing.assert_array_equal(own.values, array)
    assert found["a"][1][1] == 3
    assert found["b"] == array.sum()


def test_arrays_of_python_2_are_read(tmp_path):
    """What Python 2.7 writes for array([[1, 200, 255]], uint8) and float64(0.5), by protocols 0 and 2."""
    old = (
        b"(cnumpy.core.multiarray\n_reconstruct\np1\n(cnumpy\nndarray\np2\n(I0\ntp3\nS'b'\np4\ntp5\nRp6\n(I1\n(I1\nI3\n"
        b"tp7\ncnumpy\ndtype\np8\n(S'u1'\np9\nI0\nI1\ntp10\nRp11\n(I3\nS'|'\np12\nNNNI-1\nI-1\nI0\ntp13\nbI00\n"
        b"S'\\x01\\xc8\\xff'\np14\ntp15\nbcnumpy.core.multiarray\nscalar\np16\n(g8\n(S'f8'\np17\nI0\nI1\ntp18\nRp19\n"
        b"(I3\nS'<'\np20\nNNNI-1\nI-1\nI0\ntp21\nbS'\\x00\\x00\\x00\\x00\\x00\\x00\\xe0?'\np22\ntp23\nRp24\ntp25\n."
    )
    new = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03(K\x01K\x01"
        b"K\x03\x86cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
        b"tb\x89U\x03\x01\xc8\xfftbcnumpy.core.multiarray\nscalar\nq\x06h\x04U\x02f8K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff"
        b"\xff\xff\xffJ\xff\xff\xff\xffK\x00tbU\x08\x00\x00\x00\x00\x00\x00\xe0?\x86R\x86."
    )
    for content in (old, new):
        expected = pickle.loads(content, encoding="latin1")  # numpy's own reading
        np.testing.assert_array_equal(expected[0], [[1, 200, 255]])
        found = read(tmp_path, content)
        assert found[0].values.tolist() == [[1, 200, 255]]
        assert found[0].values.dtype == np.uint8
        assert found[1] == expected[1] == 0.5


class Calls:
    """Something that is pickled as a call."""

    def __init__(self, function, *arguments, state=None):
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.parts


class Marked:
    """Its state sets attributes."""


class Referring(pickle.Pickler):
    def persistent_id(self, thing):
        return "7" if thing == "outside" else None


def referring(path):
    with path.open("wb") as file:
        Referring(file, 2).dump(["outside"])
    return path.read_bytes()


def with_name(module, name, arguments=b")"):
    return (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module
        + b"\x8c"
        + bytes([len(name)])
        + name
        + b"\x93"
        + arguments
        + b"R."
    )


def hostile(tmp_path):
    """Pickles that write a file where pickle.loads reads them, or ask for more than arrays."""
    mark = str(tmp_path / "mark")
    code = f"open({mark!r}, 'w').close()"
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n"
    kind = b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"\x80\x02" + reconstruct + b"(cnumpy\nndarray\n(K\x00tU\x01btR"
    return {
        "os.system": pickle.dumps(Calls(os.system, f"touch {mark}")),
        "by protocol 0": pickle.dumps(Calls(os.system, f"touch {mark}"), 0),
        "eval": pickle.dumps(Calls(eval, code)),
        "exec in a list": pickle.dumps([ARRAYS["bytes"], [Calls(exec, code)]]),
        "getattr": with_name(b"builtins", b"getattr"),
        "numpy's runstring": b"cnumpy.testing._private.utils\nrunstring\n(S" + repr(code).encode() + b"\n(dtR.",
        "numpy's load": b"cnumpy\nload\n(S'x'\ntR.",
        "numpy's fromfile": b"cnumpy.core.multiarray\nfromfile\n(S'/etc/passwd'\ntR.",
        "a method of an array": with_name(b"numpy", b"ndarray.tofile"),
        "a module behind numpy": with_name(b"numpy", b"os.system"),
        "bytes of a size": b"c__builtin__\nbytes\n(J\xff\xff\xff\x7ftR.",
        "codecs": b"c_codecs\ndecode\n(S'x'\nS'hex'\ntR.",
        "another encoding": b"c_codecs\nencode\n(S'x'\nS'bz2'\ntR.",
        "a dict of numbers": pickle.dumps({1: ARRAYS["bytes"]}),
        "items of a list": b"]K\x00K\x01s.",
        "an instance, by INST": b"(S'touch " + mark.encode() + b"'\nios\nsystem\n.",
        "an instance, by OBJ": b"(cos\nsystem\nS'touch " + mark.encode() + b"'\no.",
        "an instance of a class": pickle.dumps(Marked()),
        "NEWOBJ of an array": b"\x80\x02cnumpy\nndarray\nK\x05\x85\x81.",
        "a call of a text": b"S'system'\n)R.",
        "a call of a list": b"])R.",
        "a call with no tuple": b"cnumpy\ndtype\n]R.",
        "a state of a list": b"]}b.",
        "a state of a name": b"cnumpy\ndtype\n(N}S'name'\nS'scalar'\nstb.",
        "attributes of an array": array + b"}S'values'\nK\x01sb.",
        "slots of an array": array + b"N}S'values'\nK\x01s\x86b.",
        "an extension": b"\x80\x02\x82\x01.",
        "a reference outside": referring(tmp_path / "persistent.pkl"),
        "a reference outside, by protocol 0": b"P7\n.",
        "a buffer outside": b"\x80\x05\x97.",
        "a set": pickle.dumps({1, 2}, 4),
        "a complex number": pickle.dumps(1j),
        "an object's bytes for an array": array + b"(K\x01K\x01\x85" + kind + b"\x89U\x08ABCDEFGHtb.",
        "an array with fields": pickle.dumps(np.zeros(3, [("a", "f8")])),
        "an array of texts": pickle.dumps(np.array(["a", "bc"])),
        "an array of dates": pickle.dumps(np.array(["2020-01-01"], "M8[D]")),
        "too few bytes": array + b"(K\x01K\x05\x85cnumpy\ndtype\n(U\x02u1K\x00K\x01tR\x89U\x03abctb.",
        "a negative shape": array + b"(K\x01I-1\nI-1\n\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR\x89U\x01atb.",
        "a wrong state": array + b"K\x01\x85b.",
        "nothing": b"",
        "no end": pickle.dumps(ARRAYS["bytes"])[:-5],
        "text": b"images and labels",
        "only an end": b".",
    }  # fmt: skip


def nested(what):
    """Pickles in which 2 ** 200 parts would have to be gone through: lists or tuples of the one before, twice."""
    start, pair = {"tuples": (b")q\x00", b"h\x00h\x00\x86q\x00"), "lists": (b"]q\x00", b"](h\x00h\x00eq\x00")}[what]
    return b"\x80\x02" + start + 200 * pair


def exploding():
    """Pickles that are small and would take for ever: to hash, to show, to compare or to convert."""
    lists, tuples = nested("lists"), nested("tuples")
    return {
        "a key": tuples[:2] + b"}" + tuples[2:] + b"K\x01s.",
        "keys": tuples[:2] + b"}(" + tuples[2:] + b"K\x01h\x00K\x01u.",
        "a new dict's key": tuples[:2] + b"(" + tuples[2:] + b"K\x01d.",
        "a dtype": lists + b"cnumpy\ndtype\nh\x00\x85R.",
        "an encoding": lists + b"c_codecs\nencode\nh\x00h\x00\x86R.",
        "a number's data": lists + b"cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nU\x02f8\x85Rh\x00\x86R.",
        "a shape": lists + b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01h\x00K\x01K\x01K\x01tb.",
        "an order of bytes": lists + b"cnumpy\ndtype\nU\x02f8\x85R(K\x03h\x00NNNK\x01K\x01K\x00tb.",
        "fields": lists + b"cnumpy\ndtype\nU\x02f8\x85R(K\x03U\x01<Nh\x00NK\x01K\x01K\x00tb.",
        "a call": lists + b"h\x00)R.",
        "a state": lists + b"h\x00h\x00b.",
    }


def huge():
    """Pickles of a few bytes that ask for gigabytes."""
    kind = b"cnumpy\ndtype\n(U\x02f8K\x00K\x01tR"
    array = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return {
        "a text of 2 GB": b"\x80\x02X" + struct.pack("<I", 2**31) + b"abc",
        "bytes of a terabyte": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"abc.",
        "a bytearray of 100 GB": b"\x80\x05\x96" + struct.pack("<Q", 10**11) + b"abc.",
        "a frame of 100 GB": b"\x80\x04\x95" + struct.pack("<Q", 10**11) + b"abc.",
        "a place in the memo": b"\x80\x02]r\xff\xff\xff\x7fj\xff\xff\xff\x7e.",
        "a shape": array + b"(K\x01\x8a\x07" + (2**50).to_bytes(7, "little") + b"\x85" + kind + b"\x89U\x03abctb.",
        "a first shape": array.replace(b"(K\x00t", b"(J\xff\xff\xff\x7ft") + b"K\x01b.",
        "an array by its class": b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.",
        "a number": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01.",
    }  # fmt: skip


def test_hostile_pickles_are_hostile(tmp_path):
    """The test's own files do what they say, where Python reads them."""
    for name in ("os.system", "by protocol 0", "eval", "exec in a list", "an instance, by INST", "an instance, by OBJ"):
        mark = tmp_path / "mark"
        pickle.loads(hostile(tmp_path)[name])
        assert mark.exists(), name
        mark.unlink()


def test_what_is_no_array_is_refused_and_not_executed(tmp_path):
    for name, content in hostile(tmp_path).items():
        with pytest.raises(DataError, match=r"file\.pkl cannot be read: .*\. Get it anew\."):
            pytest.fail(f"{name} was read: {read(tmp_path, content)!r}")
        assert not (tmp_path / "mark").exists(), name


def test_what_is_huge_is_refused_at_once(tmp_path):
    tracemalloc.start()
    try:
        for name, content in huge().items():
            with pytest.raises(DataError, match="cannot be read"):
                pytest.fail(f"{name} was read: {read(tmp_path, content)!r}")
            assert tracemalloc.get_traced_memory()[1] < 2**22, name
    finally:
        tracemalloc.stop()


def test_what_explodes_is_refused(tmp_path):
    for name, content in exploding().items():
        with pytest.raises(DataError, match="cannot be read"):
            pytest.fail(f"{name} was read: {type(read(tmp_path, content))}")
    for what in ("lists", "tuples"):
        path = tmp_path / "file.pkl"
        path.write_bytes(nested(what) + b".")
        with pytest.raises(ValueError, match="too deep|is empty"):
            numbers(read_pickle(path, ""), Budget(path))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_a_changed_file_is_read_or_refused_and_nothing_else(tmp_path):
    """Bytes changed at random: no other error, and no more memory than a file of this size can need."""
    random = np.random.default_rng(0)
    things = [{"a": [ARRAYS["bytes"], 0.5], "b": (ARRAYS["doubles"], ARRAYS["doubles"][0, 0])}, [objects((2, 3))]]
    whole = [pickle.dumps(thing, protocol) for thing in things for protocol in (0, 2, 4, 5)]
    refused = 0
    tracemalloc.start()
    for k in range(800):
        content = np.frombuffer(whole[k % len(whole)], np.uint8).copy()
        content[random.integers(len(content), size=random.integers(1, 4))] = random.integers(256)
        try:
            read(tmp_path, content.tobytes())
        except DataError:
            refused += 1
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
    assert 200 < refused < 800


def test_names_that_are_read_stand_for_nothing_but_themselves(tmp_path):
    """A class or a function of numpy in a file is none when it has been read."""
    found = read(tmp_path, b"(cnumpy\ndtype\ncnumpy.core.multiarray\n_reconstruct\nt.")
    assert [type(own).__name__ for own in found] == ["Name", "Name"]
    assert not any(callable(own) for own in found)


def test_the_message_says_what_was_asked_for(tmp_path):
    for content, message in (
        (pickle.dumps(Calls(eval, "1")), "it names builtins.eval"),
        (pickle.dumps(Marked()), r"it has an opcode that arrays do not need|it names"),
        (b"]}b.", "it gives a state to what has none"),
        (pickle.dumps(np.array(["a"])), "not of numbers"),
        (pickle.dumps(ARRAYS["bytes"])[:-5], "it ends too early"),
    ):
        with pytest.raises(DataError, match=message):
            read(tmp_path, content)
    with pytest.raises(DataError, match=r"There is no file .*other\.pkl\. Get it anew"):
        read_pickle(tmp_path / "other.pkl", "Get it anew.")


def objects(shape):
    found = np.empty(shape, object)
    for k in range(found.size):
        found.flat[k] = np.full((2, 2), k) if k % 3 else k
    return found


def test_arrays_of_objects_are_read_as_rows(tmp_path):
    np.save(tmp_path / "views.npy", objects((2, 4, 3)), allow_pickle=True)
    objects((2, 4, 3)).dump(tmp_path / "views.pkl")
    for path in (tmp_path / "views.npy", tmp_path / "views.pkl"):
        found = rows(read_pickle(path, "Get it anew."))
        assert len(found) == 2
        assert [rows(view)[0] for view in rows(found[1])] == [12, 15, 18, 21]
        assert rows(rows(found[1])[2])[1].values.tolist() == [[19, 19], [19, 19]]


def test_npy_files_with_something_else_are_refused(tmp_path):
    hidden = np.empty(1, object)
    hidden[0] = Calls(os.system, f"touch {tmp_path / 'mark'}")
    for array, message in ((np.zeros(3), "an array of numbers"), (hidden, "it names (posix|nt).system")):
        np.save(tmp_path / "file.npy", array, allow_pickle=True)
        with pytest.raises(DataError, match=message):
            read_pickle(tmp_path / "file.npy", "Get it anew.")
    assert not (tmp_path / "mark").exists()


def as_numbers(tmp_path, thing):
    path = tmp_path / "file.pkl"
    path.write_bytes(pickle.dumps(thing))
    return numbers(read_pickle(path, ""), Budget(path))


def test_lists_become_arrays(tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    for thing in (array.tolist(), [array[0], array[1]], (list(array[0]), array[1].tolist()), array):
        np.testing.assert_array_equal(as_numbers(tmp_path, thing), array)
    assert as_numbers(tmp_path, list(range(1000))).shape == (1000,)
    for thing, message in (
        ([[1, 2], [3]], "differ in shape"),
        ([], "is empty"),
        ([np.zeros(2), np.zeros(3)], "differ in shape"),
        ("abc", "a str where a list"),
        ([None], "a NoneType where"),
        ({}, "a dict where"),
        ([[[[[[[1]]]]]]], "too deep"),
        ([10**400], "too large"),
    ):
        with pytest.raises((ValueError, OverflowError), match=message):
            as_numbers(tmp_path, thing)


def test_lists_that_explode_are_refused(tmp_path):
    bomb = np.zeros(1000)
    for _ in range(6):
        bomb = [bomb] * 60  # 46 billion arrays, in a file of 9 kB
    round_about = [1.0]
    round_about.append(round_about)
    with pytest.raises(ValueError, match="larger in memory than a file of this size"):
        as_numbers(tmp_path, bomb)
    with pytest.raises(ValueError, match="too deep|differ"):
        as_numbers(tmp_path, round_about)
