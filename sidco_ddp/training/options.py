"""The command line of `train.py`."""

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from sidco_ddp import COMPRESSORS
from sidco_ddp.training.checkpoints.every import Every
from sidco_ddp.training.errors import OptionError
from sidco_ddp.workloads import SCALES, TASKS, DataSource
from sidco_ddp.workloads.recipe import OPTIMIZERS

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SHORT_FOR_SETTINGS = ("epochs", "batch_size", "lr", "optimizer", "corpus")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run is asked to do. What the task's recipe says is not here, but for `settings`, which change it."""

    task: str
    scale: str
    settings: dict[str, str]
    data_dir: str
    download: bool
    synthetic: bool
    workers: int
    compressor: str
    ratio: float
    ratio_warmup_epochs: int
    dense_steps: int
    steps: int | None
    target: float | None
    seed: int
    device: str
    backend: str
    bucket_cap_mb: float | None
    timeout: float | None
    checkpoint_dir: str | None
    checkpoint_every: Every
    keep: int
    resume: str | None
    check_replicas: int
    log_dir: str
    quiet: bool
    list_tasks: bool

    @property
    def patience(self) -> timedelta | None:
        """How long an exchange may take."""
        return None if self.timeout is None else timedelta(seconds=self.timeout)

    @property
    def source(self) -> DataSource:
        """Where the data comes from."""
        return DataSource(
            data_dir=Path(self.data_dir), synthetic=self.synthetic, download=self.download, workers=self.workers
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line.

    Raises:
        OptionError: something is wrong with it.
    """
    parser = _make_parser()
    values, unknown = parser.parse_known_args(arguments)
    given = vars(values)
    if unknown:
        known = [_flag(name) for name in given]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "--help lists the options"
        raise OptionError(f"unrecognized arguments: {' '.join(unknown)}; {remedy}")
    for name in ("checkpoint_dir", "resume", "log_dir", "data_dir"):
        if given[name] == "":
            raise OptionError(f"argument {_flag(name)}: '' is refused; give a folder, or leave it out")
    for name in ("checkpoint_every", "keep"):
        if given[name] is not None and given["checkpoint_dir"] is None:
            raise OptionError(f"argument {_flag(name)}: there is nothing to save to; give --checkpoint-dir DIR")
    given["checkpoint_every"] = given["checkpoint_every"] or Every(seconds=600.0)
    given["keep"] = given["keep"] or 3
    if given["resume"] == "auto" and given["checkpoint_dir"] is None:
        raise OptionError("argument --resume: 'auto' looks into the checkpoint folder; give --checkpoint-dir DIR")
    return Options(settings=_settings(given, given.pop("set")), **given)


def _flag(name: str) -> str:
    """The option whose value argparse calls `name`."""
    return f"--{name.replace('_', '-')}"


def _settings(given: dict[str, object], pairs: Sequence[str]) -> dict[str, str]:
    """The changed settings of the recipe, as text; options that are short for one are taken out of `given`."""
    short = {name: given.pop(name) for name in _SHORT_FOR_SETTINGS}
    settings = {name: str(value) for name, value in short.items() if value is not None}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise OptionError(f"argument --set: {pair!r} is refused; give name=value, such as lr=0.1")
        name = name.replace("-", "_")
        if settings.setdefault(name, value) != value:
            raise OptionError(f"argument --set: {pair!r} contradicts {name}={settings[name]}; give one of them")
    return settings


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
    finite = _number(float, "a number", math.isfinite)
    patience = _number(float, "seconds, from 0.1 to a million", lambda value: 0.1 <= value <= 1e6)
    at_least_one = _number(int, "a whole number of at least 1", lambda value: value >= 1)
    at_least_zero = _number(int, "a whole number of at least 0", lambda value: 0 <= value < 2**63)
    ratio = _number(float, "a number above 0 and at most 1, such as 0.001", lambda value: 0 < value <= 1)

    add = parser.add_argument_group("task").add_argument
    add("--task", default="digits", choices=TASKS, help="what to train (default: %(default)s)")
    add("--scale", default="paper", choices=SCALES, help="small fits a laptop (default: %(default)s)")
    add("--list-tasks", action="store_true", help="print the tasks with their recipes, and stop")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting of the recipe; repeatable")
    add("--epochs", type=at_least_one, help="passes over the data (default: the task's, or enough for --steps)")
    add("--batch-size", type=at_least_one, help="samples per worker and step (default: the task's)")
    add("--lr", type=positive, help="peak learning rate (default: the task's)")
    add("--optimizer", choices=OPTIMIZERS, help="what applies the gradient (default: the task's)")
    add("--corpus", help="text to train on, where the task has a choice (default: the task's)")
    add("--steps", type=at_least_one, help="stop after so many optimizer steps (default: at the end of the epochs)")
    add("--target", type=finite, help="stop at the first evaluation whose metric is as good as this")
    add("--seed", type=at_least_zero, default=0, help="of weights and data order (default: %(default)s)")

    add = parser.add_argument_group("data").add_argument
    add("--data-dir", default="data", help="folder with the data sets, or with this one (default: %(default)s)")
    add("--download", action="store_true", help="fetch what is missing, where the data set allows it")
    add("--synthetic", action="store_true", help="random data of the right shapes, to measure speed without files")
    add("--workers", type=at_least_zero, default=0, help="loader processes a rank; 0: the rank (default: %(default)s)")

    add = parser.add_argument_group("exchange").add_argument
    add("--compressor", default="sidco-e", choices=COMPRESSORS, help="what selects the entries (default: %(default)s)")
    add("--ratio", type=ratio, default=0.001, help="fraction to send; none sends all (default: %(default)s)")
    add("--ratio-warmup-epochs", type=at_least_zero, default=0, help="epochs in which the ratio falls from 0.25 to it")
    add("--dense-steps", type=at_least_zero, default=0, help="first steps sent whole (default: %(default)s)")
    add("--bucket-cap-mb", type=positive, help="size of DDP's gradient buckets (default: DDP's)")
    add("--device", default="auto", choices=DEVICES, help="auto is cuda where there is one (default: %(default)s)")
    add("--backend", default="auto", choices=BACKENDS, help="auto is nccl on cuda, gloo on cpu (default: %(default)s)")

    add("--timeout", type=patience, metavar="SECONDS", help="end when an exchange takes longer (default: torch's)")
    add(
        "--check-replicas",
        type=at_least_zero,
        default=0,
        metavar="N",
        help="compare the ranks' parameters every N steps",
    )

    add = parser.add_argument_group("checkpoints").add_argument
    add("--checkpoint-dir", metavar="DIR", help="where they are written; all ranks must see it (default: none are)")
    add("--checkpoint-every", type=_every, metavar="N", help="steps, or a time: 30s, 2h (default: 10m)")
    add("--keep", type=at_least_one, help="how many checkpoints stay (default: 3)")
    add("--resume", metavar="auto|PATH", help="go on from the latest in --checkpoint-dir, if any, or from this one")

    add = parser.add_argument_group("record").add_argument
    add("--log-dir", default="runs", help="where the run's own folder is made (default: %(default)s)")
    add("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _every(text: str) -> Every:
    """A type for argparse: how often to save."""
    count, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    with suppress(ValueError):
        if not unit and int(count) >= 1:
            return Every(steps=int(count))
        if unit and 0 < float(count) < math.inf:
            return Every(seconds=float(count) * _UNITS[unit])
    raise argparse.ArgumentTypeError(f"{text!r} is refused; give steps, such as 500, or a time, such as 30s, 10m or 2h")


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
