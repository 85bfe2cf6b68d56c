"""What a checkpoint says of itself."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = 1
MANIFEST = "manifest.json"


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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, and see it on the disk."""
    with open(folder / MANIFEST, "w") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: it does not, or is of a format that is not known here.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text())
        found = content["format"]
        manifest = Manifest(**content) if found == FORMAT else None
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: {MANIFEST} is damaged ({error})") from error
    if manifest is None:
        raise CheckpointError(f"{folder} has format {found!r}, this version reads {FORMAT}")
    counts = isinstance(manifest.step, int) and isinstance(manifest.world_size, int) and manifest.world_size >= 1
    if not counts or not isinstance(manifest.identity, dict) or not isinstance(manifest.files, dict):
        raise CheckpointError(f"{folder} is no checkpoint: {MANIFEST} is damaged (a value has a wrong type)")
    return manifest


def identity_of(folder: Path) -> Mapping[str, str] | None:
    """Of which run a checkpoint is, or None where it does not say."""
    try:
        return read_manifest(folder).identity
    except CheckpointError:
        return None
