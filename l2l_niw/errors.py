"""What can go wrong, named for what the user did."""

import importlib
from types import ModuleType


class NIWError(Exception):
    """Base class of every error that l2l_niw raises on purpose."""


class ArgumentError(NIWError, ValueError):
    """An argument is outside its domain."""


class NoTemperatureError(ArgumentError):
    """Predictions get ever better the colder, or the hotter, they are made."""


class ModelError(NIWError, TypeError):
    """A model's parameters cannot be random variables."""


class LossError(NIWError, RuntimeError):
    """A loss cannot be used for a step: not a finite scalar with a graph to the learner's weights."""


class ChainError(NIWError, RuntimeError):
    """A call that needs a chain was made on an object that has none, or too short a one."""


class CheckpointError(NIWError, RuntimeError):
    """A state dict belongs to another model or to another reading of the Wishart."""


class WriteError(NIWError, RuntimeError):
    """A file cannot be written: its folder is read-only, or the disk is full."""


class InUseError(NIWError, RuntimeError):
    """Another process works in the same folder."""


class DataError(NIWError, FileNotFoundError):
    """Data are not where they were looked for."""


class ExtraError(NIWError, ImportError):
    """A package is missing that only some users need."""


def require(package: str, extra: str) -> ModuleType:
    """A package that an extra brings, imported where it is used."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ExtraError(f"{package.split('.')[0]} is needed here: pip install 'l2l_niw[{extra}]'.") from error
