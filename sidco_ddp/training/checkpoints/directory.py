"""The folder that holds a run's checkpoints.

DIR/step-00000040/manifest.json     written last, before the folder gets its name
DIR/step-00000040/shared.pt         model, optimizer, schedule: the same on every rank, written by the main rank
DIR/step-00000040/rank-00000.pt     residuals, random states: each rank its own
DIR/writing-00000060/               not complete: being written, or left by a run that was killed
DIR/aside-...                       of a later step than one that a run went on from
DIR/lock                            held by the main rank of the run that writes here
"""

import fcntl
import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from sidco_ddp.training.checkpoints.files import sync_folder
from sidco_ddp.training.checkpoints.manifest import CheckpointError, Manifest, identity_of, write_manifest

_PATIENCE = 10.0  # seconds


class Directory:
    """The folder that holds a run's checkpoints."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None

    def open(self) -> str:
        """Make the folder, and keep other runs from writing to it until this process ends or calls :meth:`close`.

        Returns a word that is now written there, for :meth:`check_is_shared`.

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
        except BlockingIOError as error:
            self._lock.seek(0)
            holder = self._lock.readline().strip() or "unknown"
            self._lock.close()
            raise CheckpointError(
                f"{str(self.path)!r} is in use by another run (process {holder}); give each run a folder of its own"
            ) from error
        except OSError as error:
            self._lock.close()
            raise CheckpointError(
                f"{str(self.path)!r} cannot be locked ({error.strerror}); give a folder on a file system that has locks"
            ) from error
        word = uuid.uuid4().hex
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()} on {socket.gethostname()}\n{word}\n")
        self._lock.flush()
        return word

    def check_is_shared(self, word: str) -> None:
        """See that this rank finds the word that the main rank has written there.

        Raises:
            CheckpointError: it does not, or cannot write there.
        """
        deadline = time.monotonic() + _PATIENCE  # a network file system may show new content late
        while not self._has(word):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{str(self.path)!r} is not the folder that the main rank has; give one that all ranks share"
                )
            time.sleep(0.1)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise CheckpointError(f"{str(self.path)!r} cannot be written (Permission denied); give a folder that can")

    def _has(self, word: str) -> bool:
        try:
            return word in (self.path / "lock").read_text()
        except FileNotFoundError:
            return False

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
        """Make a complete draft visible, by one rename. To be called by the main rank, when all have written.

        Raises:
            CheckpointError: another run has a checkpoint of that name, which is not touched.
        """
        draft, folder = self.draft(manifest.step), self.folder(manifest.step)
        if folder.exists() and identity_of(folder) not in (None, manifest.identity):
            raise CheckpointError(f"{folder} is of another run; give each run a folder of its own")
        write_manifest(draft, manifest)
        sync_folder(draft)
        if folder.exists():  # of the same step, by a run that could not read it
            folder.rename(self._trash())
        draft.rename(folder)
        sync_folder(self.path)
        return folder

    def candidates(self) -> list[Path]:
        """The folders that claim to be complete, latest step first. The step counts, not the clock."""
        found = [path for path in self.path.glob("step-*") if path.name[5:].isdecimal()]
        return sorted(found, key=_step_of, reverse=True)

    def own(self, identity: Mapping[str, str]) -> list[Path]:
        """Those of the candidates that a run of this identity has made."""
        return [path for path in self.candidates() if identity_of(path) == identity]

    def set_aside(self, step: int, identity: Mapping[str, str]) -> list[Path]:
        """Rename this run's checkpoints of later steps, which it did not go on from; returns where they are now.

        Else they would be taken for the latest, and those to come removed as the oldest.
        """
        later = [path for path in self.own(identity) if _step_of(path) > step]
        return [path.rename(self.path / f"aside-{path.name}-{uuid.uuid4().hex[:8]}") for path in later]

    def prune(self, keep: int, identity: Mapping[str, str]) -> None:
        """Remove the oldest checkpoints of this run's identity beyond `keep`, and what was never completed."""
        for path in self.own(identity)[keep:]:
            path.rename(self._trash())  # first, so that nothing that is half removed has a name that counts
        for path in [*self.path.glob("writing-*"), *self.path.glob("replaced-*")]:
            shutil.rmtree(path, ignore_errors=True)

    def _trash(self) -> Path:
        return self.path / f"replaced-{uuid.uuid4().hex[:8]}"


def _step_of(path: Path) -> int:
    return int(path.name[5:])
