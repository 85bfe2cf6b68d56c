"""The command line of ``sidco-ddp report``."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from sidco_ddp.tools.arguments import file, number
from sidco_ddp.tools.report.comparison import compare
from sidco_ddp.tools.report.packs import FORMAT, load, write_pack
from sidco_ddp.tools.report.records import ReportError
from sidco_ddp.tools.report.tables import render


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``report`` and its options."""
    parser = commands.add_parser(
        "report",
        help="compare runs of train.py: speed-up, throughput, estimation quality",
        description="Compare runs of train.py that share a task, a scale and a number of ranks: normalised training "
        "speed-up, normalised throughput and estimation quality, as tables on stdout and as pictures.",
    )
    option = parser.add_argument
    option(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder, a folder that holds some, or a pack (.json)"
    )
    option(
        "--baseline",
        type=Path,
        metavar="RUN",
        help="what to normalise by: a path, or the name of one of the runs (default: those of the compressor none)",
    )
    option(
        "--target",
        type=number,
        metavar="VALUE",
        help="metric that the speed-up is the time to (default: the target that the baseline was given, or else the "
        "baseline's final metric)",
    )
    option("--format", choices=("text", "markdown", "json"), default="text", help="of the tables (default: text)")
    option("--output", type=Path, default=Path("report"), metavar="DIR", help="for the pictures (default: report)")
    option("--no-figures", action="store_true", help="draw no pictures, which need matplotlib")
    option("--pack", type=file, metavar="FILE", help="write what the report needs of the runs to one small JSON file")
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Read, compare, print, and write what was asked for; returns the exit status."""
    try:
        _check(options)
        runs, notes = load(options.runs)
        baseline: list[dict[str, Any]] = []
        if options.baseline is not None:
            baseline = [run for run in runs if run["name"] == str(options.baseline)]
            if not baseline:
                baseline, more = load([options.baseline])
                notes += [note for note in more if note not in notes]
        for note in notes:
            print(f"{parser.prog}: note: {note}", file=sys.stderr)
        comparisons = compare(runs, baseline, options.target)
        if options.pack:
            write_pack([*runs, *(run for run in baseline if run not in runs)], options.pack)
    except ReportError as error:
        parser.error(str(error))
    if options.format == "json":
        print(json.dumps({"format": FORMAT, "comparisons": comparisons}, indent=1, ensure_ascii=False))
    else:
        print("\n\n".join(render(found, markdown=options.format == "markdown") for found in comparisons))
    if not options.no_figures:
        _draw(options.output, comparisons, [*runs, *baseline])
    return 0


def _draw(folder: Path, comparisons: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    from sidco_ddp.tools.report.figures import draw  # matplotlib is an extra

    for path in draw(comparisons, runs, folder):
        print(path, file=sys.stderr)


def _check(options: argparse.Namespace) -> None:
    """What can be said before anything is read."""
    if options.no_figures:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ReportError("matplotlib is missing; pip install 'sidco_ddp[bench]', or give --no-figures")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(
            f"--output: {str(options.output)!r} cannot be made ({error.strerror or error}); name another folder"
        ) from None
