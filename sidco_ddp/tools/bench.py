"""``sidco-ddp bench``: what a compress step costs, for every compressor, beside top-k and beside one addition."""

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sidco_ddp import COMPRESSORS, make_compressor
from sidco_ddp.tools import environment, memory
from sidco_ddp.tools.arguments import count, file, listed, one_of, ratio, size
from sidco_ddp.tools.measure import Case, run_case
from sidco_ddp.tools.sources import SHAPES, SOURCES
from sidco_ddp.tools.table import render

FORMAT = 1  # of the JSON
SPARSE = [name for name in COMPRESSORS if make_compressor(name).sparse]


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``bench`` and its options."""
    parser = commands.add_parser(
        "bench",
        help="time the compressors against top-k and against one addition",
        description="Time compensate + estimate + select + record for every compressor, interleaved, in one process. "
        "Lists are separated by commas.",
    )
    option = parser.add_argument
    sizes = listed(size)
    option("--sizes", type=sizes, metavar="N,...", help="elements: 26000000, 26M (default: 0.26M,2.6M,26M)")
    option("--shape", type=listed(one_of(SHAPES)), default=[], metavar="MODEL,...", help=", ".join(SHAPES))
    option("--source", type=listed(one_of(SOURCES)), default=["laplace"], metavar="NAME,...", help=", ".join(SOURCES))
    option("--ratios", type=listed(ratio), default=[0.1, 0.01, 0.001], metavar="R,...", help="default: 0.1,0.01,0.001")
    option("--compressors", type=listed(one_of(COMPRESSORS)), default=SPARSE, metavar="NAME,...", help=_names())
    option("--devices", type=listed(_device), metavar="NAME,...", help="cpu, cuda (default: all that there are)")
    option("--threads", type=count(1), default=1, metavar="N", help="CPU threads (default: 1)")
    option("--repeats", type=count(1), default=15, metavar="N", help="timed steps of each compressor (default: 15)")
    option("--warmup", type=count(1), default=10, metavar="N", help="steps before these (default: 10)")
    option("--seed", type=count(0), default=0, metavar="N", help="of the gradients (default: 0)")
    option("--json", type=file, metavar="FILE", help="write everything that was measured")
    option("--png", type=_picture, metavar="FILE", help="draw speed-up, time and count (needs matplotlib)")
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure, print each table as soon as it is there, and write the files that were asked for."""
    cases = list(_cases(options))
    for case in cases:
        _check_memory(case, len(options.compressors), parser)
    torch.set_num_threads(options.threads)
    print(environment.one_line())
    measured = []
    for case in cases:
        found = run_case(case, options.compressors, repeats=options.repeats, warmup=options.warmup, seed=options.seed)
        measured.append(found)
        print(f"\n{render(found)}", flush=True)
    report = {
        "format": FORMAT,
        "environment": environment.describe(),
        "repeats": options.repeats,
        "warmup": options.warmup,
        "seed": options.seed,
        "cases": measured,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.png:
        from sidco_ddp.tools.figure import draw  # matplotlib is an extra

        draw(report, options.png)
    return 0


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    sizes = options.sizes or ([] if options.shape else [size("0.26M"), size("2.6M"), size("26M")])
    vectors = sizes + [(name, SHAPES[name]) for name in options.shape]
    for device in options.devices or ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for label, elements in vectors:
            for source in options.source:
                for kept in options.ratios:
                    yield Case(device, label, elements, source, kept)


def _check_memory(case: Case, num_compressors: int, parser: argparse.ArgumentParser) -> None:
    """Better now than after an hour, or by way of the system's out-of-memory killer."""
    there, needed = memory.physical(torch.device(case.device)), case.needed_bytes(num_compressors)
    if there is not None and needed > there:
        parser.error(
            f"{case.label} ({case.source}) with {num_compressors} compressors needs about {needed / 1e9:.0f} GB, "
            f"{case.device} has {there / 1e9:.0f}; name fewer --compressors or smaller --sizes"
        )


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of cpu, cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("'cuda' is not there; leave it out, or install a torch that sees the GPU")
    return text


def _picture(text: str) -> Path:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is missing; pip install 'sidco_ddp[bench]', or leave --png out")
    return file(text)


def _names() -> str:
    return f"{', '.join(COMPRESSORS)} (default: all but none)"
