"""Pickles of numpy arrays, read without numpy's or anybody's constructors: nothing that a file names is ever called."""

import math
import mmap
import pickle
import re
from pathlib import Path
from typing import IO, Any, Callable, ClassVar, Dict, List, Sequence, Tuple, Union

import numpy as np

from l2l_niw.errors import DataError

# Of arrays, numbers, texts, lists, tuples and dicts; none that makes other objects.
# fmt: off
_OPCODES = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1",
    "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT",
    "DICT", "SETITEM", "SETITEMS", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET", "MEMOIZE",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
)
# fmt: on
_CORE = {
    f"{package}.multiarray.{name}" for package in ("numpy.core", "numpy._core") for name in ("_reconstruct", "scalar")
}
_NUMERIC = {f"{package}.numeric._frombuffer" for package in ("numpy.core", "numpy._core")}
_NAMES = {"numpy.ndarray", "numpy.dtype", "_codecs.encode", "__builtin__.bytes", *_CORE, *_NUMERIC}
_CODE = re.compile(r"b1|[iu][1248]|f[248]")
_GROWTH = 8  # bytes in memory to a byte of a file, at most: a number of 2 bytes becomes one of 8


class Name:
    """A function or class that a file may name. It stands for numpy's, which stays out of it."""

    def __init__(self, name: str):
        self.name = name.rpartition(".")[2]

    def call(self, *arguments: Any) -> Any:
        """What numpy's would make of arguments, as one of the classes here."""
        if self.name == "dtype" and arguments and isinstance(arguments[0], str):
            return Type(arguments[0])
        if self.name == "_reconstruct":
            return Array()
        if self.name == "scalar":
            return _number(*arguments)
        if self.name == "_frombuffer":
            data, kind, shape, order = arguments
            return Array().build((1, shape, kind, order == "F", data))
        if self.name == "bytes" and not arguments:  # how protocol 2 writes none
            return b""
        if self.name == "encode" and arguments[1:] in (("latin1",), ("latin-1",)):
            return arguments[0].encode("latin1")
        raise pickle.UnpicklingError(f"{self.name} is called as no array needs it")


class Type:
    """A dtype: a number's, or that of objects."""

    def __init__(self, code: str):
        self.code, self.order = code.lstrip("<>=|"), code[0] if code[0] in "<>" else "="

    def build(self, state: Tuple) -> "Type":
        """With the state that numpy writes, which is empty but for the order of bytes."""
        if any(part is not None for part in state[2:5]) or state[1] not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError("an array has fields")
        self.order = "=" if state[1] == "|" else state[1]
        return self

    @property
    def holds_objects(self) -> bool:
        """Whether it is not a number's."""
        return self.code in ("O", "O4", "O8")

    def numbers(self) -> np.dtype:
        """As numpy's."""
        if not _CODE.fullmatch(self.code):
            raise pickle.UnpicklingError(f"an array is of type {self.code!r:.20}, not of numbers")
        return np.dtype(self.order + self.code)


class Array:
    """An array of numbers, `values`, or of objects, `items` in rows."""

    def __init__(self) -> None:
        self.shape: Tuple[int, ...] = (0,)
        self.values = np.empty(0)
        self.items: Union[List[Any], None] = None

    def build(self, state: Tuple) -> "Array":
        """With the state that numpy writes: a version, the shape, dtype, order and data."""
        _, shape, kind, columns, data = state
        if not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 8:
            raise pickle.UnpicklingError("an array has no shape")
        self.shape = tuple(shape)
        if kind.holds_objects:
            if not isinstance(data, list) or len(data) != math.prod(shape) or columns:
                raise pickle.UnpicklingError(f"an array of shape {shape} has other data")
            self.items = data
            return self
        if isinstance(data, str):  # Python 2's bytes
            data = data.encode("latin1")
        own = kind.numbers()
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * own.itemsize:
            raise pickle.UnpicklingError(f"an array of shape {shape} has other data")
        self.values = np.frombuffer(data, own).reshape(shape, order="F" if columns else "C")
        return self


def _number(kind: Type, data: Union[bytes, str]) -> Any:
    return Array().build((1, (), kind, False, data)).values.item()


class _Reader(pickle._Unpickler):
    """Python's own reader, which keeps its memo in a dict, with few opcodes: none calls what is not a `Name`."""

    dispatch: ClassVar[Dict[int, Callable[..., None]]]
    stack: List[Any]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    pop_mark: Callable[[], List[Any]]

    def find_class(self, module: str, name: str) -> Name:
        """A stand-in."""
        if f"{module}.{name}" not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}"[:200])
        return Name(f"{module}.{name}")

    def load_reduce(self) -> None:
        """Stand-ins can be called."""
        arguments = self.stack.pop()
        if type(self.stack[-1]) is not Name or type(arguments) is not tuple:
            raise pickle.UnpicklingError("it calls what is no function")
        self.stack[-1] = self.stack[-1].call(*arguments)

    def load_build(self) -> None:
        """Arrays and dtypes have a state."""
        state = self.stack.pop()
        if type(self.stack[-1]) not in (Array, Type) or type(state) is not tuple:
            raise pickle.UnpicklingError("it gives a state to what has none")
        self.stack[-1].build(state)

    def load_dict(self) -> None:
        """A new one, of keys and values in turn."""
        items = self.pop_mark()
        self.append({})
        self._fill(items)

    def load_setitem(self) -> None:
        """One key and its value."""
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def load_setitems(self) -> None:
        """Keys and values in turn."""
        self._fill(self.pop_mark())

    def _fill(self, items: List[Any]) -> None:
        """Puts items into a dict. Keys are texts: to look up nested tuples could take for ever."""
        if type(self.stack[-1]) is not dict or any(type(key) is not str for key in items[::2]):
            raise pickle.UnpicklingError("it has a dict whose keys are no texts")
        self.stack[-1].update(zip(items[::2], items[1::2]))

    def load_bytearray8(self) -> None:
        """Bytes: nothing is set aside for those that the file does not have."""
        length = int.from_bytes(self.read(8), "little")
        self.append(self.read(length))


_Reader.dispatch = {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES}
for _name in ("REDUCE", "BUILD", "DICT", "SETITEM", "SETITEMS", "BYTEARRAY8"):
    _Reader.dispatch[getattr(pickle, _name)[0]] = getattr(_Reader, f"load_{_name.lower()}")


def read_pickle(path: Path, remedy: str) -> Any:
    """
    **Description**

    What a pickle or an .npy file holds: numbers, texts, lists, tuples and dicts as they are, arrays as `Array`. Nothing
    else can be in there, and nothing is executed.

    **Arguments**

    * **path** (Path) - Of the file.
    * **remedy** (str) - What to do where it cannot be read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if path.suffix == ".npy":
                _skip_header(content)
            return _Reader(content, encoding="latin1").load()
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}. {remedy}") from error
    except KeyError as error:
        what = "it has an opcode that arrays do not need" if error.args and type(error.args[0]) is int else repr(error)
        raise DataError(f"{path} cannot be read: {what}. {remedy}") from error
    except EOFError as error:
        raise DataError(f"{path} cannot be read: it ends too early. {remedy}") from error
    except Exception as error:  # broken content can raise anything
        raise DataError(f"{path} cannot be read: {error}. {remedy}") from error


def _skip_header(content: Any) -> None:
    """Goes to where the objects of an .npy file start."""
    file: IO[bytes] = content
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    kind = read[np.lib.format.read_magic(file)](file)[2]
    if not kind.hasobject:
        raise pickle.UnpicklingError("it is an array of numbers, not of views with their centres")


class Budget:
    """How many bytes may still be made of a file, which lists of one array many times could else let explode."""

    def __init__(self, path: Path):
        self.left = _GROWTH * path.stat().st_size + 2**16

    def spend(self, size: int) -> None:
        """Raises where nothing is left."""
        self.left -= size
        if self.left < 0:
            raise ValueError("it is larger in memory than a file of this size can be")


def rows(node: Any) -> Sequence[Any]:
    """What a list, a tuple or an array of objects has along its first axis."""
    if isinstance(node, (list, tuple)):
        return node
    if not isinstance(node, Array) or node.items is None or not node.shape:
        raise ValueError(f"there is a {type(node).__name__} where a list should be")
    if len(node.shape) == 1:
        return node.items
    each, parts = math.prod(node.shape[1:]), []
    for k in range(node.shape[0]):
        part = Array()
        part.shape, part.items = node.shape[1:], node.items[k * each : (k + 1) * each]
        parts.append(part)
    return parts


def numbers(node: Any, budget: Budget, depth: int = 6) -> np.ndarray:
    """An array of what is one, or a list of numbers, or of lists or arrays of one shape."""
    if isinstance(node, Array) and node.items is None:
        budget.spend(64 + node.values.nbytes)
        return node.values
    if isinstance(node, (int, float)):
        budget.spend(8)
        return np.asarray(float(node))
    if depth == 0:
        raise ValueError("lists are too deep")
    parts = [numbers(part, budget, depth - 1) for part in rows(node)]
    if not parts or any(part.shape != parts[0].shape for part in parts):
        raise ValueError("a list is empty, or its parts differ in shape")
    return np.stack(parts)
