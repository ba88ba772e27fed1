"""Files are replaced as a whole, and folders belong to one process at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from l2l_niw.errors import ArgumentError, CheckpointError, InUseError, NIWError, WriteError
from l2l_niw.utils import _files
from l2l_niw.utils._disk_cache import disk_cache
from l2l_niw.utils._files import folder_of, locked, make_folder, read_json, replacing, write

FULL, READ_ONLY = Path("/dev/full"), Path("/sys/kernel")  # as root may write to any other folder
linux = pytest.mark.skipif(not (FULL.exists() and READ_ONLY.exists()), reason="needs Linux's /dev/full and /sys")
HOLD = """
import sys, time
from pathlib import Path
from l2l_niw.utils._files import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@linux
def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "log.csv"
    write(path, "old")
    (tmp_path / "log.csv.new").symlink_to(FULL)
    with pytest.raises(WriteError, match=r"log.csv cannot be written: No space left on device\. Free space"):
        write(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("log.csv", "old")]


def test_an_error_on_the_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"new" * (1 // 0))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("checkpoint.pt", "old")]


@linux
def test_a_read_only_folder_is_named():
    with pytest.raises(WriteError, match=r"/sys/kernel/a cannot be written: .*make the folder writable"):
        write(READ_ONLY / "a", "")
    with pytest.raises(WriteError, match=r"/sys/kernel/a cannot be made a folder: .*Choose another"):
        make_folder(READ_ONLY / "a")
    with pytest.raises(WriteError, match=r"/sys/kernel/.lock cannot be written"), locked(READ_ONLY / ".lock"):
        pass


@pytest.mark.parametrize("name", ["", "  "])
def test_a_folder_has_a_name(name):
    with pytest.raises(ArgumentError, match="--out must name a folder"):
        folder_of("--out", name)
    assert folder_of("--out", ".") == Path()


def test_json_that_cannot_be_read_is_named(tmp_path):
    for content in (b"{", b"\xff"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="a.json cannot be read: .*Do this"):
            read_json(tmp_path / "a.json", "Do this.")
    with pytest.raises(CheckpointError, match="Do this"):
        read_json(tmp_path / "none.json", "Do this.")


@pytest.mark.slow
@pytest.mark.skipif(_files.fcntl is None, reason="this system has no flock")
def test_a_lock_names_its_process_and_a_killed_one_frees_it(tmp_path):
    path = tmp_path / "run" / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "locked\n"
            with (
                pytest.raises(InUseError, match=f"run is in use by process {holder.pid} on .*Wait for it"),
                locked(path),
            ):
                pytest.fail("two processes hold one lock")
        finally:
            holder.kill()
    with locked(path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")


def test_without_locks_nothing_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "fcntl", None)
    with locked(tmp_path / ".lock"), locked(tmp_path / ".lock"):
        assert not (tmp_path / ".lock").exists()


class TestDiskCache:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        return tmp_path / "hub" / "l2l_niw"

    def test_tensors_are_computed_once(self, home):
        assert torch.equal(disk_cache("a", lambda: {"x": torch.ones(2)})["x"], torch.ones(2))
        assert torch.equal(disk_cache("a", lambda: pytest.fail("computed again"))["x"], torch.ones(2))
        assert [path.name for path in home.iterdir()] == ["a.safetensors"]

    def test_a_broken_file_is_named(self, home):
        home.mkdir(parents=True)
        (home / "a.safetensors").write_bytes(b"none")
        with pytest.raises(NIWError, match="a.safetensors cannot be read: .* Delete it"):
            disk_cache("a", dict)

    @linux
    def test_a_full_disk_and_a_read_only_home_are_named(self, home, monkeypatch):
        resource = pytest.importorskip("resource")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # files of 1,000 bytes at most
        try:
            with pytest.raises(WriteError, match=r"a.safetensors cannot be written: .* set TORCH_HOME"):
                disk_cache("a", lambda: {"x": torch.ones(10_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list(home.glob("a.*"))
        assert not issubclass(WriteError, OSError)  # which readers of data take for broken data
        monkeypatch.setenv("TORCH_HOME", str(READ_ONLY))
        with pytest.raises(WriteError, match="cannot be made: .* Set TORCH_HOME"):
            disk_cache("a", lambda: pytest.fail("computed before there was a folder"))
