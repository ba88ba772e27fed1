"""Files that a stop leaves whole, folders that one process at a time works in, and errors that name them."""

import json
import os
import platform
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Iterator, Union

from l2l_niw.errors import ArgumentError, CheckpointError, InUseError, WriteError

try:
    import fcntl
except ImportError:  # not a Unix system: folders are not locked there
    fcntl = None  # type: ignore[assignment]


def folder_of(name: str, folder: Union[str, Path]) -> Path:
    """A folder to write to; an empty name would be the current one."""
    if not str(folder).strip():
        raise ArgumentError(f"{name} must name a folder, got {str(folder)!r}. The current one is '.'.")
    return Path(folder)


def not_written(path: Path, error: OSError) -> WriteError:
    """What to say, and to do, where a file cannot be written."""
    reason = error.strerror or error
    return WriteError(
        f"{path} cannot be written: {reason}. Free space on the disk, make the folder writable, or choose another."
    )


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents where they are missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{folder} cannot be made a folder: {error.strerror}. Choose another.") from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that replaces `path` once it is complete: a stop or a full disk leaves the old one."""
    new = path.with_name(f"{path.name}.new")
    try:
        try:
            with new.open("wb") as file:
                yield file
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise not_written(path, error) from error


def write(path: Path, content: Union[str, bytes]) -> None:
    """Replaces a file's content."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_page(path: Path, text: str) -> None:
    """As `write`, where there is nothing yet, or an earlier page with the same title."""
    title = text.partition("\n")[0]
    if path.exists() and path.read_text().partition("\n")[0] != title:
        raise ArgumentError(f"{path} is there already, and is no report '{title}'. Move it away, or the results.")
    write(path, text)


def read_json(path: Path, remedy: str) -> Any:
    """A JSON file's content."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {remedy}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """
    **Description**

    Keeps other processes out as long as the context lasts, by an flock on a file that also says who holds it. The
    kernel frees the lock however a process ends, so that none is ever stale. Where the system has no such locks
    nothing is done.

    **Arguments**

    * **path** (Path) - The lock file. It stays: to remove it would let two processes lock two files of that name.

    **Example**

    ~~~python
    with locked(folder / '.lock'):
        training.save(folder)
    ~~~
    """
    if fcntl is None:
        yield
        return
    make_folder(path.parent)
    try:
        file = path.open("a+")
    except OSError as error:
        raise not_written(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise InUseError(
                f"{path.parent} is in use by {file.read().strip() or 'another process'} (lock file {path.name}). Wait "
                "for it to end, stop it, or choose another folder."
            ) from error
        except OSError:  # a file system without locks
            yield
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield
