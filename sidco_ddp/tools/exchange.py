"""``sidco-ddp exchange``: how long an exchange takes between these ranks, whole and by its parts."""

import argparse
import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sidco_ddp import COMPRESSORS, attach, make_compressor
from sidco_ddp.tools import environment
from sidco_ddp.tools.arguments import count, file, listed, one_of, ratio, size
from sidco_ddp.tools.measure import summary
from sidco_ddp.tools.sources import SOURCES
from sidco_ddp.tools.table import aligned, milliseconds
from sidco_ddp.training.distributed import World, find_world, process_group
from sidco_ddp.training.errors import OptionError
from sidco_ddp.training.options import BACKENDS, DEVICES

FORMAT = 1  # of the JSON
# Two layers of 1500 units over an embedding of 10,000 words, and a decoder: the paper's LSTM, in its parameters.
LSTM = (15_000_000, *(2 * (9_000_000, 9_000_000, 6_000, 6_000)), 15_000_000, 10_000)
SHIFTS = 1 << 20  # gradients of one draw, each a place further on
HEADINGS = ("compressor", "ratio", "step ms", "whole ms", "compress ms", "rest ms", "MB sent", "x none")


@dataclass(frozen=True)
class Case:
    """One row: a compressor at a ratio."""

    compressor: str
    ratio: float


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``exchange`` and its options."""
    parser = commands.add_parser(
        "exchange",
        help="time the exchange of a gradient between ranks",
        description="Time backward passes that exchange a gradient, on the ranks that a launcher started. "
        "Lists are separated by commas.",
    )
    option = parser.add_argument
    option("--elements", type=size, metavar="N", help="length of the gradient (default: the LSTM's 66,034,000)")
    option(
        "--compressors",
        type=listed(one_of(COMPRESSORS)),
        default=["none", "topk", "sidco-e"],
        metavar="NAME,...",
        help=f"{', '.join(COMPRESSORS)} (default: none,topk,sidco-e)",
    )
    option("--ratios", type=listed(ratio), default=[0.01, 0.001], metavar="R,...", help="default: 0.01,0.001")
    option("--source", type=one_of(SOURCES), default="t3", metavar="NAME", help=f"{', '.join(SOURCES)} (default: t3)")
    option("--repeats", type=count(1), default=5, metavar="N", help="timed steps of each row (default: 5)")
    option("--warmup", type=count(1), default=5, metavar="N", help="steps before these (default: 5)")
    option("--seed", type=count(0), default=0, metavar="N", help="of the gradients (default: 0)")
    option("--device", default="auto", choices=DEVICES, help="default: %(default)s")
    option("--backend", default="auto", choices=BACKENDS, help="default: %(default)s")
    option("--note", default="", metavar="TEXT", help="kept in the JSON, such as what the links are")
    option("--output", type=file, metavar="FILE", help="write everything that was measured, as JSON")
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure on all ranks; the main one prints each row as soon as it is there, and writes the file."""
    try:
        world = find_world(options.device, options.backend)
    except OptionError as error:
        parser.error(str(error))
    with process_group(world):
        report = _measure(options, world)
    if world.is_main and options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _measure(options: argparse.Namespace, world: World) -> dict[str, Any]:
    sizes = (options.elements[1],) if options.elements else LSTM
    elements = sum(sizes)
    if world.is_main:
        print(environment.one_line())
        print(f"{world.world_size} ranks, {world.backend}, {elements:,} elements ({options.source})")
        print(_line(HEADINGS), flush=True)
    model = _Gradients(sizes, options.source, options.seed + world.rank, world.device)
    rows: list[dict[str, Any]] = []
    dense = None
    for case in _cases(options):
        found = _timed_steps(model, case, warmup=options.warmup, repeats=options.repeats, world=world)
        whole = found["whole_seconds"]["median"]
        dense = whole if case.compressor == "none" else dense
        rows.append({**asdict(case), **found, "speedup_over_none": None if dense is None else dense / whole})
        if world.is_main:
            print(_line(_row(rows[-1])), flush=True)
    return {
        "format": FORMAT,
        "environment": {**environment.describe(), "backend": world.backend, "world_size": world.world_size},
        "note": options.note,
        "elements": elements,
        "source": options.source,
        "seed": options.seed,
        "repeats": options.repeats,
        "warmup": options.warmup,
        "cases": rows,
    }


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for name in options.compressors:
        ratios = options.ratios if make_compressor(name).sparse else [1.0]
        yield from (Case(name, one) for one in ratios)


class _Handed(torch.autograd.Function):
    """A loss whose gradients are those that it is handed."""

    @staticmethod
    def forward(context: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        context.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, *context.gradients


class _Gradients(nn.Module):
    """Parameters of these sizes, and a backward pass that costs nothing: its gradients are drawn beforehand.

    Every gradient is the same draw from another place on, which a bucket's error feedback cannot tell from a new draw.
    """

    def __init__(self, sizes: Sequence[int], source: str, seed: int, device: torch.device) -> None:
        super().__init__()
        # Nobody reads or writes the parameters, so that the system need not find memory for them.
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(size, device=device)) for size in sizes)
        self._sizes = sizes
        self._drawn = torch.empty(max(sizes) + SHIFTS, device=device)
        SOURCES[source](self._drawn, 0, torch.Generator(device).manual_seed(seed))

    def forward(self, step: int) -> Tensor:
        starts = [(step * 7919 + number * 104_729) % SHIFTS for number in range(len(self._sizes))]
        gradients = [self._drawn[start : start + size] for start, size in zip(starts, self._sizes, strict=True)]
        loss: Tensor = _Handed.apply(gradients, *self.weights)
        return loss


def _timed_steps(model: _Gradients, case: Case, *, warmup: int, repeats: int, world: World) -> dict[str, Any]:
    """Times of one case. Each is the slowest rank's, and each step has its like without an exchange just before it."""
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    for _ in range(2):  # after the first, DDP makes its buckets anew; a hook would keep residuals of both for a while
        _timed_backward(replica, 0, world)
    state = attach(replica, case.compressor, ratio=case.ratio)
    times: list[list[float]] = []
    for step in range(warmup + repeats):
        with replica.no_sync():
            alone = _timed_backward(replica, step, world)
        whole = _timed_backward(replica, step, world)
        total = state.stats()["total"]
        if step >= warmup:
            times.append([whole, alone, total["compress_seconds"], total["exchange_seconds"]])
    slowest = torch.tensor(times, dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    step_seconds, backward, compress, in_flight = slowest.T
    whole_seconds = step_seconds - backward
    columns = {
        "step_seconds": step_seconds,
        "backward_seconds": backward,
        "whole_seconds": whole_seconds,
        "compress_seconds": compress,
        "rest_seconds": whole_seconds - compress,
        "in_flight_seconds": in_flight,
    }
    found: dict[str, Any] = {name: summary(column.tolist()) for name, column in columns.items()}
    found |= {name: total[name] for name in ("k", "sent_khat", "bytes_sent", "dense_bytes")}
    model.zero_grad()
    del replica, state
    gc.collect()  # a DDP model is a cycle, and the next one needs its memory
    return found


def _timed_backward(replica: DistributedDataParallel, step: int, world: World) -> float:
    replica.zero_grad(set_to_none=False)  # so that gradients are added in place, with an exchange and without
    loss = replica(step)
    _synchronise(world)
    dist.barrier()
    started = time.perf_counter()
    loss.backward()
    _synchronise(world)
    return time.perf_counter() - started


def _synchronise(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    speedup = found["speedup_over_none"]
    return (
        found["compressor"],
        f"{found['ratio']:g}",
        milliseconds(found["step_seconds"]["median"]),
        milliseconds(found["whole_seconds"]["median"]),
        milliseconds(found["compress_seconds"]["median"]),
        milliseconds(found["rest_seconds"]["median"]),
        f"{found['bytes_sent'] / 1e6:.3g}",
        "-" if speedup is None else f"{speedup:.1f}",
    )


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(aligned(cells, [10, 6, 8, 8, 11, 8, 8, 6]))
