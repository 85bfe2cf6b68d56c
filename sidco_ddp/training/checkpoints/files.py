"""The files of a checkpoint: written so that they are on the disk, and read only if they are what was written."""

import hashlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from sidco_ddp.training.checkpoints.manifest import CheckpointError, Manifest

SHARED = "shared.pt"
_PIECE = 1 << 22  # bytes read at a time


def rank_file(rank: int) -> str:
    """The name of the file of one rank."""
    return f"rank-{rank:05d}.pt"


def write_file(path: Path, content: Mapping[str, Any]) -> str:
    """Write tensors and plain types, and see them on the disk; returns the SHA-256 of what was written."""
    with open(path, "wb") as file:
        sink = _Sink(file)
        try:
            torch.save(dict(content), cast(IO[bytes], sink))
        except RuntimeError:
            if sink.error is not None:
                raise sink.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return sink.digest.hexdigest()


def read_file(folder: Path, name: str, manifest: Manifest) -> dict[str, Any]:
    """Read a file of a checkpoint.

    Raises:
        CheckpointError: it is not there, or not what was written.
    """
    path = folder / name
    try:
        if checksum(path) != manifest.files[name]:
            raise CheckpointError(f"{path} is not what was written: it is truncated or damaged")
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, KeyError) as error:
        raise CheckpointError(f"{path} is missing or cannot be read ({error})") from error
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is no file of tensors and plain types ({error})") from error
    return content


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def sync_folder(path: Path) -> None:
    """See the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sink:
    """Digests what goes to a file, and keeps the error of one that cannot be written: `torch.save` has its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.digest.update(data)
        return written

    def flush(self) -> None:
        self._file.flush()
