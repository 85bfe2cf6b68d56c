"""Going on from a checkpoint: which one, and what of it each rank needs. All ranks take the same one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidco_ddp.redistribute import sources
from sidco_ddp.training.checkpoints.directory import Directory
from sidco_ddp.training.checkpoints.files import SHARED, rank_file, read_file
from sidco_ddp.training.checkpoints.manifest import MANIFEST, CheckpointError, Manifest, read_manifest
from sidco_ddp.training.distributed import World, from_main, together
from sidco_ddp.training.errors import OptionError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What one rank read of a checkpoint.

    Attributes:
        path: its folder.
        manifest: what it says of itself.
        shared: model, optimizer and all that is the same on every rank.
        own: the saved ranks' parts that this rank takes over: its own, where there are as many ranks as before.
        template: the part of some saved rank, for what is nearly the same on all.
    """

    path: Path
    manifest: Manifest
    shared: dict[str, Any]
    own: list[dict[str, Any]]
    template: dict[str, Any]


def load_latest(directory: Directory, identity: Mapping[str, str], world: World) -> Loaded | None:
    """Read the latest checkpoint that all ranks can read and go on from; None if there is none.

    Those that are passed over are logged, with the reason.
    """
    for candidate in from_main(directory.candidates, world):
        try:
            return together(lambda path=candidate: _read(path, identity, world), world)  # type: ignore[misc]
        except OptionError as error:
            if world.is_main:
                logger.warning("passed over: %s", error)
    return None


def load_path(path: Path, identity: Mapping[str, str], world: World) -> Loaded:
    """Read one checkpoint, or the latest of a directory that can be gone on from.

    Raises:
        OptionError: on all ranks, if that cannot be done.
    """
    if from_main(lambda: not (path / MANIFEST).exists() and bool(Directory(path).candidates()), world):
        latest = load_latest(Directory(path), identity, world)
        if latest is None:
            raise OptionError(f"argument --resume: {str(path)!r} has no checkpoint that this run can go on from")
        return latest
    try:
        return together(lambda: _read(path, identity, world), world)
    except OptionError as error:
        raise OptionError(f"argument --resume: {error}; give another checkpoint, or auto") from error


def _read(path: Path, identity: Mapping[str, str], world: World) -> Loaded:
    manifest = read_manifest(path)
    for name, wanted in identity.items():
        found = manifest.identity.get(name)
        if found != wanted:
            raise CheckpointError(f"{path} is of another run: its {name} is {found!r}, this one's {wanted!r}")
    own = [
        read_file(path, rank_file(rank), manifest)
        for rank in sources(world.rank, world.world_size, manifest.world_size)
    ]
    some = own[0] if own else read_file(path, rank_file(world.rank % manifest.world_size), manifest)
    return Loaded(path, manifest, read_file(path, SHARED, manifest), own, some)
