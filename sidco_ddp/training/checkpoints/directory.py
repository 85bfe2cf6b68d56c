"""What lies on the disk: one folder a checkpoint, with a manifest that says what must be in it.

DIR/step-00000040/manifest.json     written last, before the folder gets its name
DIR/step-00000040/shared.pt         model, optimizer, schedule: the same on every rank, written by the main rank
DIR/step-00000040/rank-00000.pt     residuals, random states: each rank its own
DIR/writing-00000060/               not complete: being written, or left by a run that was killed
DIR/lock                            held by the main rank of the run that writes here
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

FORMAT = 1
SHARED = "shared.pt"
MANIFEST = "manifest.json"
_PIECE = 1 << 22  # bytes read at a time
_PATIENCE = 10.0  # seconds


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or cannot be taken; the message names the path and the reason."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        identity: what a run must have in common with it to go on from it, as strings by name.
        files: the SHA-256 of each file by name.
        format: of this layout.
    """

    step: int
    world_size: int
    identity: Mapping[str, str]
    files: Mapping[str, str]
    format: int = FORMAT


def rank_file(rank: int) -> str:
    """The name of the file of one rank."""
    return f"rank-{rank:05d}.pt"


def write_file(path: Path, content: Mapping[str, Any]) -> str:
    """Write tensors and plain types, and see them on the disk; returns the SHA-256."""
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
    return checksum(path)


class _Sink:
    """Keeps the error of a file that cannot be written, which `torch.save` replaces by one of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


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


class Directory:
    """The folder that holds a run's checkpoints."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Make the folder, and keep other runs from writing to it until this process ends or calls :meth:`close`.

        Raises:
            CheckpointError: it cannot be written, or another run has it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "a+")  # noqa: SIM115 (held as long as the run lasts)
        except OSError as error:
            raise CheckpointError(
                f"{str(self.path)!r} cannot be written ({error.strerror or error}); give a folder that can"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise CheckpointError(
                f"{str(self.path)!r} is in use by another run (process {holder}); give each run a folder of its own"
            ) from error
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()

    def check_is_shared(self) -> None:
        """See that this rank finds what the main rank has made there.

        Raises:
            CheckpointError: it does not, or cannot write there.
        """
        deadline = time.monotonic() + _PATIENCE  # a network file system may show new names late
        while not (self.path / "lock").exists():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{str(self.path)!r} is not the folder that the main rank has; give one that all ranks share"
                )
            time.sleep(0.1)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise CheckpointError(f"{str(self.path)!r} cannot be written (Permission denied); give a folder that can")

    def close(self) -> None:
        """Let other runs have it."""
        if self._lock is not None:
            self._lock.close()

    def folder(self, step: int) -> Path:
        """Where the complete checkpoint of a step is."""
        return self.path / f"step-{step:08d}"

    def draft(self, step: int) -> Path:
        """Where the checkpoint of a step is while it is written."""
        return self.path / f"writing-{step:08d}"

    def start(self, step: int) -> Path:
        """An empty draft. To be called by the main rank, before the others write to it."""
        draft = self.draft(step)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        return draft

    def drop(self, step: int) -> None:
        """Remove a draft that will not be complete: a full disk needs the room."""
        shutil.rmtree(self.draft(step), ignore_errors=True)

    def commit(self, manifest: Manifest) -> Path:
        """Make a complete draft visible, by one rename. To be called by the main rank, when all have written."""
        draft, folder = self.draft(manifest.step), self.folder(manifest.step)
        with open(draft / MANIFEST, "w") as file:
            json.dump(asdict(manifest), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(draft)
        if folder.exists():  # of the same step, by a run that could not read it
            folder.rename(self.path / f"replaced-{manifest.step:08d}-{os.getpid()}")
        draft.rename(folder)
        sync_folder(self.path)
        return folder

    def candidates(self) -> list[Path]:
        """The folders that claim to be complete, latest step first. The step counts, not the clock."""
        return sorted(self.path.glob("step-" + "[0-9]" * 8), reverse=True)

    def own(self, identity: Mapping[str, str]) -> list[Path]:
        """Those of the candidates that a run of this identity has made."""
        return [path for path in self.candidates() if _identity_of(path) == identity]

    def set_aside(self, step: int, identity: Mapping[str, str]) -> list[Path]:
        """Rename this run's checkpoints of later steps, which it did not go on from; returns where they are now.

        Else they would be taken for the latest, and those to come removed as the oldest.
        """
        moved = []
        for path in self.own(identity):
            if path.name > self.folder(step).name:
                moved.append(path.rename(self.path / f"aside-{path.name}-{os.getpid()}"))
        return moved

    def prune(self, keep: int, identity: Mapping[str, str]) -> None:
        """Remove the oldest checkpoints of this run's identity beyond `keep`, and what was never completed."""
        left_over = [*self.path.glob("writing-*"), *self.path.glob("replaced-*")]
        for path in [*self.own(identity)[keep:], *left_over]:
            shutil.rmtree(path, ignore_errors=True)


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: it does not, or is of a format that is not known here.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text())
        found = content["format"]
        if found != FORMAT:
            raise CheckpointError(f"{folder} has format {found!r}, this version reads {FORMAT}")
        return Manifest(**content)
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} is no checkpoint: {MANIFEST} is damaged ({error})") from error


def _identity_of(folder: Path) -> Mapping[str, str] | None:
    try:
        return read_manifest(folder).identity
    except CheckpointError:
        return None
