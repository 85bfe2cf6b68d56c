"""The command line of `train.py`: what can be asked for, and what is refused before any process group exists."""

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from sidco_ddp import COMPRESSORS
from sidco_ddp.training.optimizers import OPTIMIZERS
from sidco_ddp.workloads import TASKS, Task

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")


class OptionError(ValueError):
    """Something asked for cannot be had; the message names the option, the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run is to do, settled: nothing is left to the task's recipe but the length of the run."""

    task: str
    compressor: str
    ratio: float
    epochs: int | None
    steps: int | None
    batch_size: int
    lr: float
    optimizer: str
    seed: int
    device: str
    backend: str
    dense_steps: int
    bucket_cap_mb: float | None
    log_dir: str
    quiet: bool


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; whatever is wrong with it is an `OptionError`."""
    parser = _make_parser()
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [f"--{name.replace('_', '-')}" for name in vars(values)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "--help lists the options"
        raise OptionError(f"unrecognized arguments: {' '.join(unknown)}; {remedy}")
    return values


def settle(values: argparse.Namespace, task: Task, world_size: int) -> Options:
    """Let the task's recipe fill in what was not given; a batch that the workers cannot fill is an `OptionError`."""
    given = {name: value for name, value in vars(values).items() if value is not None}
    recipe = {name: getattr(task.recipe, name) for name in ("batch_size", "lr", "optimizer")}
    options = Options(**{**vars(values), **recipe, **given})
    shard = task.num_train_samples // world_size
    if options.batch_size > shard:
        remedy = f"give at most {shard}" if shard else f"start at most {task.num_train_samples} workers"
        raise OptionError(
            f"argument --batch-size: {options.batch_size} is more than the {shard} training samples that each of "
            f"{world_size} worker(s) has; {remedy}"
        )
    return options


class _Parser(argparse.ArgumentParser):
    """A parser that reports by exception, for only one of many ranks is to print."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(" ".join(message.split()))


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train.py",
        allow_abbrev=False,
        description="Train a model with DistributedDataParallel and a sparsifying gradient hook: "
        "one process by itself, or as many as torchrun starts. The last line on stdout is a JSON summary.",
    )
    positive = _number(float, "a number above 0", lambda value: 0 < value < math.inf)
    at_least_one = _number(int, "a whole number of at least 1", lambda value: value >= 1)
    at_least_zero = _number(int, "a whole number of at least 0", lambda value: 0 <= value < 2**63)
    ratio = _number(float, "a number above 0 and at most 1, such as 0.001", lambda value: 0 < value <= 1)
    add = parser.add_argument
    add("--task", default="digits", choices=TASKS, help="what to train (default: %(default)s)")
    add("--compressor", default="sidco-e", choices=COMPRESSORS, help="what selects the entries (default: %(default)s)")
    add("--ratio", type=ratio, default=0.001, help="fraction to send; none sends all (default: %(default)s)")
    add("--epochs", type=at_least_one, help="passes over the data (default: the task's, or enough for --steps)")
    add("--steps", type=at_least_one, help="stop after so many optimizer steps (default: at the end of the epochs)")
    add("--batch-size", type=at_least_one, help="samples per worker and step (default: the task's)")
    add("--lr", type=positive, help="peak learning rate (default: the task's)")
    add("--optimizer", choices=OPTIMIZERS, help="what applies the gradient (default: the task's)")
    add("--seed", type=at_least_zero, default=0, help="of weights and data order (default: %(default)s)")
    add("--device", default="auto", choices=DEVICES, help="auto is cuda where there is one (default: %(default)s)")
    add("--backend", default="auto", choices=BACKENDS, help="auto is nccl on cuda, gloo on cpu (default: %(default)s)")
    add("--dense-steps", type=at_least_zero, default=0, help="first steps sent whole (default: %(default)s)")
    add("--bucket-cap-mb", type=positive, help="size of DDP's gradient buckets (default: DDP's)")
    add("--log-dir", default="runs", help="where the run's own folder is made (default: %(default)s)")
    add("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _number(kind: Callable[[str], float], wanted: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """A type for argparse: `kind` of the text, if `holds` is true of it."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):  # false of nan as well
            raise argparse.ArgumentTypeError(f"{text!r} is refused; give {wanted}")
        return value

    return convert
