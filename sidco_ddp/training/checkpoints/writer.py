"""Saving: each rank copies its state between two steps and writes it in a thread, while training goes on."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from sidco_ddp.training.checkpoints.directory import Directory
from sidco_ddp.training.checkpoints.every import Every
from sidco_ddp.training.checkpoints.files import SHARED, rank_file, write_file
from sidco_ddp.training.checkpoints.manifest import CheckpointError, Manifest
from sidco_ddp.training.distributed import World, together, total

logger = logging.getLogger(__name__)

_POLL = 0.02  # seconds
Snapshot = Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]  # copies: what is shared, and this rank's own


class _Part:
    """One rank's files of one checkpoint, written by a thread."""

    def __init__(self, step: int, write: Callable[[], dict[str, str]]) -> None:
        self.step = step
        self.files: dict[str, str] = {}
        self.problem: str | None = None
        self._write = write
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.files = self._write()
        except Exception as error:
            self.problem = str(error) or type(error).__name__


class Checkpoints:
    """Writes the checkpoints of a run to a directory that all ranks share.

    A save starts with :meth:`start` on all ranks, between the same two steps. It is complete, and visible, once all
    ranks call :meth:`finish`. One that fails is given up with an error in the log, and those before it are untouched.

    Args:
        directory: already open on the main rank.
        keep: how many to keep.
        identity: what a run must have in common with a checkpoint to go on from it.
        every: how often :attr:`is_due`, in steps or seconds since the last one.
        world: who takes part.
    """

    def __init__(
        self, directory: Directory, *, keep: int, identity: Mapping[str, str], every: Every, world: World
    ) -> None:
        self.directory, self.keep, self.identity, self.every, self.world = directory, keep, identity, every, world
        self._part: _Part | None = None
        self._last_time = time.monotonic()
        self.saved_step: int | None = None  # of the last complete one

    @property
    def is_writing(self) -> bool:
        """Whether a save was started and not finished."""
        return self._part is not None

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write of the save that was started."""
        return self._part is None or self._part.is_done

    def is_due(self, step: int) -> bool:
        """Whether this rank finds that a save is due after `step`; by the clock only the main rank does."""
        if self.every.steps is not None:
            return step % self.every.steps == 0
        late = self.every.seconds is not None and time.monotonic() - self._last_time >= self.every.seconds
        return late and self.world.is_main

    def begin(self) -> None:
        """The run starts from the beginning.

        Raises:
            OptionError: on all ranks, if the directory has checkpoints of such a run already.
        """

        def look() -> None:
            found = self.directory.own(self.identity) if self.world.is_main else []
            if found:
                raise CheckpointError(
                    f"argument --checkpoint-dir: {str(self.directory.path)!r} has checkpoints of this run, the latest "
                    f"is {found[0].name}; give --resume auto to go on from it, or another folder"
                )

        together(look, self.world)

    def resumed(self, step: int, *, in_place: bool) -> None:
        """The run goes on from a checkpoint; if that is `in_place`, in the same directory, it need not be saved.

        Raises:
            OptionError: on all ranks, if the checkpoints of later steps cannot be set aside.
        """
        self.saved_step = step if in_place else None

        def clear_the_way() -> None:
            if self.world.is_main:
                for path in self.directory.set_aside(step, self.identity):
                    logger.warning("a checkpoint of a later step was set aside: %s", path)

        together(clear_the_way, self.world)

    def start(self, step: int, snapshot: Snapshot) -> None:
        """Copy the state, and begin to write it."""
        self._last_time = time.monotonic()

        def begin() -> None:
            if self.world.is_main:
                self.directory.start(step)

        try:
            together(begin, self.world)
        except ValueError as error:
            self._give_up(step, str(error))
            return
        shared, own = snapshot()
        draft, world = self.directory.draft(step), self.world

        def write() -> dict[str, str]:
            files = {rank_file(world.rank): write_file(draft / rank_file(world.rank), own)}
            if world.is_main:
                files[SHARED] = write_file(draft / SHARED, shared)
            return files

        self._part = _Part(step, write)

    def finish(self) -> bool:
        """Wait for all ranks' parts, and make the checkpoint visible; says whether that went well, alike on all."""
        part, self._part = self._part, None
        if part is None:
            return False
        while total(torch.tensor([float(not part.is_done)], dtype=torch.float64), self.world).item():
            time.sleep(_POLL)  # in short exchanges: in one, a slow disk would run into the group's timeout
        reports: list[tuple[dict[str, str], str | None]] = [({}, None)] * self.world.world_size
        dist.all_gather_object(reports, (part.files, part.problem))

        def commit() -> None:
            for rank, (_, problem) in enumerate(reports):
                if problem is not None:
                    raise CheckpointError(f"{problem} (on rank {rank})")
            if self.world.is_main:
                files = {name: digest for written, _ in reports for name, digest in written.items()}
                draft = self.directory.draft(part.step)
                for name in files:
                    if not (draft / name).exists():
                        raise CheckpointError(f"{draft / name} is not seen by the main rank: all ranks must share DIR")
                manifest = Manifest(
                    step=part.step, world_size=self.world.world_size, identity=dict(self.identity), files=files
                )
                self.directory.commit(manifest)
                self.directory.prune(self.keep, self.identity)

        try:
            together(commit, self.world)
        except ValueError as error:
            self._give_up(part.step, str(error))
            return False
        self.saved_step = part.step
        return True

    def save(self, step: int, snapshot: Snapshot) -> bool:
        """Start and finish at once; says whether that went well, alike on all ranks."""
        if self.is_writing:
            self.finish()
        if self.saved_step == step:
            return True
        self.start(step, snapshot)
        return self.finish()

    def _give_up(self, step: int, reason: str) -> None:
        if self.world.is_main:
            self.directory.drop(step)
            last = (
                "there is none before it" if self.saved_step is None else f"the last one is of step {self.saved_step}"
            )
            logger.error("the checkpoint of step %d was not written: %s; %s", step, reason, last)
