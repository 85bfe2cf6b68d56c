"""Packs: the digests of any number of runs in one small JSON file, from which reports are made as from the runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidco_ddp.tools.report.digest import digest
from sidco_ddp.tools.report.records import ReportError, find_runs, read_run

FORMAT = 1


def load(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """The digests of all runs in `paths`, each once, and notes on what was left out.

    A path is a run folder, a folder that holds some, or a pack. Raises a `ReportError`.
    """
    runs: list[dict[str, Any]] = []
    notes: list[str] = []
    for path in paths:
        if path.is_file():
            found = read_pack(path)
        else:
            records = [read_run(folder) for folder in find_runs(path)]
            found = [digest(record) for record in records]
            notes += [note for record in records for note in record.notes if note not in notes]
        runs += [run for run in found if run not in runs]
    return runs, notes


def read_pack(path: Path) -> list[dict[str, Any]]:
    """The digests in a pack. Raises a `ReportError` where it is none, or of another format."""
    try:
        pack = json.loads(path.read_text(encoding="utf-8"))
        version, runs = pack["format"], pack["runs"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ReportError(f"{str(path)!r} is no pack; name a run folder, or a file that --pack wrote") from None
    if version != FORMAT:
        raise ReportError(f"{str(path)!r} has format {version}, this reads {FORMAT}; pack the runs anew")
    if not runs:
        raise ReportError(f"{str(path)!r} holds no run; pack the runs anew")
    return list(runs)


def write_pack(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a pack with a line for every field of a run, so that versions can be compared."""
    written = ",\n".join(_one_run(run) for run in runs)
    try:
        path.write_text(f'{{"format": {FORMAT}, "runs": [\n{written}\n]}}\n', encoding="utf-8")
    except OSError as error:
        raise ReportError(
            f"--pack: {str(path)!r} cannot be written ({error.strerror or error}); name another file"
        ) from None


def _one_run(run: dict[str, Any]) -> str:
    lines = [f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in run.items()]
    return "{\n" + ",\n".join(lines) + "\n}"
