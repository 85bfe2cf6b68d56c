"""Run folders as ``train.py`` leaves them, whole or broken off."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG, STEPS, EVALUATIONS, SUMMARY = "config.json", "metrics.jsonl", "evaluations.jsonl", "summary.json"
IN_CONFIG = ("task", "compressor", "ratio", "seed", "world_size", "batch_size")
IN_STEPS = ("step", "loss", "khat_over_k", "bytes_sent", "dense_bytes", "step_seconds")
IN_EVALUATIONS = ("step", "metric_name", "metric", "seconds")


class ReportError(ValueError):
    """Something given to ``report`` is not usable; the message names the path or option, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one run folder says. `summary` is None where the run was broken off, `notes` say what was left out."""

    folder: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any] | None
    notes: tuple[str, ...]


def find_runs(folder: Path) -> list[Path]:
    """The run folders in `folder`, at any depth, or `folder` itself if it is one, in the order of their paths.

    Raises a `ReportError` where there are none.
    """
    if not folder.is_dir():
        raise ReportError(f"{str(folder)!r} does not exist; name a folder that train.py made, or a pack (.json)")
    if (folder / CONFIG).is_file() or (folder / STEPS).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.rglob(STEPS) if (path.parent / CONFIG).is_file())
    if not found:
        raise ReportError(
            f"{str(folder)!r} is no run and holds none: no {CONFIG} with {STEPS} in it or below; "
            "name a folder that train.py made"
        )
    return found


def read_run(folder: Path) -> Record:
    """Read one run folder.

    A last line that a killed run left unfinished is left out and noted; whatever else cannot be read, a run without a
    single step and one without a needed field are a `ReportError`.
    """
    config = _read_object(folder / CONFIG, IN_CONFIG)
    notes: list[str] = []
    steps = list(_read_lines(folder / STEPS, IN_STEPS, notes))
    if not steps:
        raise ReportError(f"{str(folder)!r} is an empty run: no step is in its {STEPS}; remove it or name other runs")
    evaluations = list(_read_lines(folder / EVALUATIONS, IN_EVALUATIONS, notes))
    summary = _read_object(folder / SUMMARY, ()) if (folder / SUMMARY).is_file() else None
    return Record(
        folder=folder, config=config, steps=steps, evaluations=evaluations, summary=summary, notes=tuple(notes)
    )


def _read_object(path: Path, needed: Sequence[str]) -> dict[str, Any]:
    value = _parse(_read_text(path), str(path))
    _check_fields(value, needed, str(path))
    return value


def _read_lines(path: Path, needed: Sequence[str], notes: list[str]) -> Iterator[dict[str, Any]]:
    lines = _read_text(path).splitlines()
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        try:
            value = _parse(line, place)
        except ReportError:
            if number < len(lines):
                raise
            notes.append(f"{place} is cut off, as by the end of a killed run; it is left out")
            return
        _check_fields(value, needed, place)
        yield value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(
            f"{str(path)!r} cannot be read ({error.strerror or error}); is its folder a run of train.py?"
        ) from None


def _parse(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ReportError(f"{place} is not the JSON that train.py writes; mend it or leave the run out")
    return value


def _check_fields(value: dict[str, Any], needed: Sequence[str], place: str) -> None:
    for name in needed:
        if name not in value:
            raise ReportError(f"{place} has no {name!r}; it is not what train.py writes, so leave the run out")
