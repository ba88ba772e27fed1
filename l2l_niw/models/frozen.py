"""Features of a module that is not trained: of each input they are computed once, and kept on disk."""

import hashlib
import math
import sqlite3
from pathlib import Path
from typing import Dict, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from l2l_niw.errors import ArgumentError, ModelError, NIWError, WriteError
from l2l_niw.utils._checks import check_number
from l2l_niw.utils._disk_cache import cache_path

KEYS = 500  # of one question to the database
TABLE = "CREATE TABLE IF NOT EXISTS features (key BLOB PRIMARY KEY, shape TEXT, value BLOB)"


class FrozenFeatures:
    """
    **Description**

    The outputs of a module that is not trained, such as the first blocks of a pretrained transformer. What it computes
    of an input is kept in a file of torch's cache (the variable TORCH_HOME), by the input's content: neither another
    epoch nor another run computes it again, and fine-tuning the last blocks costs these alone.

    A file belongs to one module: its weights, its buffers and what it prints as. Processes may share it.

    **Arguments**

    * **module** (Module) - In evaluation mode, from inputs (n, ...) to a tensor (n, ...), each by itself.
    * **dtype** (torch.dtype, *optional*, default=torch.float32) - What features are kept in. float16 takes half the
        disk.
    * **batch** (int, *optional*, default=64) - Inputs computed at a time.
    * **tag** (str, *optional*, default='') - What the module's outputs depend on beside weights and print.

    **Example**

    ~~~python
    vit = vit_blocks(load_checkpoint(timm_backbone('dino-small'), path), size=112)
    features = FrozenFeatures(vit[:-2])
    niw = NIW(EpisodicModel(vit[-2:], NearestCentroid()), lr=1e-4)  # the last block, and what comes after it
    tasks = MappedTaskset(tasksets.train, features)
    ~~~
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32, batch: int = 64, tag: str = ""):
        check_number("batch", batch, 1, whole=True)
        if not isinstance(module, nn.Module):
            raise ModelError(f"module must be a torch.nn.Module, got {type(module).__name__}.")
        if any(part.training for part in module.modules() if not isinstance(part, nn.Sequential)):  # a slice is new
            raise ModelError(
                "module must be in evaluation mode, so that it computes the same every time: module.eval()."
            )
        if not dtype.is_floating_point:
            raise ArgumentError(f"dtype must be a floating one, such as torch.float16; got {dtype}.")
        self.module, self.dtype, self.batch = module, dtype, batch
        self._versions = [t._version for _, t in self._tensors()]
        digest = hashlib.sha256(repr((str(module), tag, str(dtype))).encode())
        for name, tensor in self._tensors():
            digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
            digest.update(_bytes(tensor))
        self.path: Path = cache_path(f"features-{digest.hexdigest()[:32]}").with_suffix(".sqlite")

    def _tensors(self) -> Iterator[Tuple[str, Tensor]]:
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """
        **Arguments**

        * **x** (Tensor) - Inputs, (n, ...).

        **Returns** their features, (n, ...), on the same device, without a graph.
        """
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise ArgumentError("x must be inputs, (n, ...), as the module takes them.")
        if [t._version for _, t in self._tensors()] != self._versions:
            raise ModelError("module has been trained or loaded since FrozenFeatures was made: make it anew.")
        keys = [hashlib.blake2b(_bytes(row), digest_size=16, person=_person(row)).digest() for row in x]
        try:
            return self._look_up(x, keys).to(x.device)
        except sqlite3.OperationalError as error:
            raise WriteError(
                f"{self.path} cannot be used: {error}. Free space there, or set TORCH_HOME to another folder."
            ) from error
        except sqlite3.DatabaseError as error:
            raise NIWError(f"{self.path} cannot be read: {error}. Delete it, and it is computed again.") from error

    def _look_up(self, x: Tensor, keys: Sequence[bytes]) -> Tensor:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(
                f"{self.path.parent} cannot be made: {error}. Set TORCH_HOME to another folder."
            ) from error
        base = sqlite3.connect(self.path, timeout=60.0)
        try:
            base.execute("PRAGMA journal_mode=WAL")  # one process may write while others read
            base.execute("PRAGMA synchronous=NORMAL")
            base.execute(TABLE)
            found = self._read(base, sorted(set(keys)))
            missing = {key: i for i, key in enumerate(keys) if key not in found}
            for some in _chunks(list(missing), self.batch):
                features = self._computed(x[[missing[key] for key in some]])
                found.update(zip(some, features))
                rows = [(key, ",".join(map(str, own.shape)), _bytes(own)) for key, own in zip(some, features)]
                with base:
                    base.executemany("INSERT OR IGNORE INTO features VALUES (?, ?, ?)", rows)
        finally:
            base.close()
        return torch.stack([found[key] for key in keys]).to(torch.promote_types(self.dtype, torch.float32))

    def _read(self, base: sqlite3.Connection, keys: List[bytes]) -> Dict[bytes, Tensor]:
        found = {}
        for some in _chunks(keys, KEYS):
            asked = f"SELECT key, shape, value FROM features WHERE key IN ({','.join('?' * len(some))})"
            for key, shape, value in base.execute(asked, some):
                sizes = [int(size) for size in shape.split(",")]
                found[key] = torch.frombuffer(bytearray(value), dtype=self.dtype).view(sizes)
        return found

    def _computed(self, x: Tensor) -> Tensor:
        features = self.module(x)
        if not isinstance(features, Tensor) or features.dim() < 2 or len(features) != len(x):
            given = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ModelError(f"module must take {len(x)} inputs to a tensor of shape ({len(x)}, ...), not {given}.")
        if not features.isfinite().all() or features.abs().max() > torch.finfo(self.dtype).max:
            raise ModelError(f"module's features are not finite, or too large for {self.dtype}.")
        return features.to("cpu", self.dtype)


def _chunks(keys: List[bytes], size: int) -> Iterator[List[bytes]]:
    for i in range(math.ceil(len(keys) / size)):
        yield keys[size * i : size * (i + 1)]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _person(row: Tensor) -> bytes:
    """Shape and type of an input, which its bytes do not tell: at most 16 bytes."""
    return hashlib.blake2b(repr((tuple(row.shape), str(row.dtype))).encode(), digest_size=16).digest()
