"""What a task is, and the one rule by which all tasks deal their data out to the workers."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sidco_ddp.workloads.recipe import Recipe

Batch = tuple[Tensor, ...]


class DataError(ValueError):
    """Data that is missing, broken or too little; the message says where, what is expected and where to get it."""


class Shard(NamedTuple):
    """The part of the data that one worker sees: every `world_size`-th portion, from `rank` on."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where a task's data comes from."""

    data_dir: Path = Path("data")
    synthetic: bool = False  # random data of the right shapes, which needs no files
    download: bool = False  # fetch what is missing, where the data set allows it
    workers: int = 0  # processes that load; 0: this one


class Task(ABC):
    """A model, its data, its loss and its metrics.

    A task knows no process group: it is told its shard, and hands back sums that add up over the shards.

    Raises:
        DataError: the data of `source` cannot be had.
    """

    name: ClassVar[str]
    metric_name: ClassVar[str]  # of the metric that a run is judged by
    higher_is_better: ClassVar[bool]
    metric_range: ClassVar[tuple[float, float]]  # of values that a `--target` may have, ends excluded below
    watched_metric: ClassVar[str] = ""  # what the plateau schedule goes by; empty: the loss of training
    recipes: ClassVar[Mapping[str, Recipe]]  # by scale: "paper" and "small"

    def __init__(self, recipe: Recipe, source: DataSource) -> None:
        self.recipe, self.source = recipe, source

    @property
    @abstractmethod
    def num_train_samples(self) -> int:
        """How many samples one epoch draws from, over all shards together."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A new model, initialised from torch's global random state."""

    @abstractmethod
    def batches(self, *, seed: int, epoch: int, shard: Shard, batch_size: int, first: int = 0) -> Iterator[Batch]:
        """This shard's batches of an epoch, from number `first` on, on the CPU; as many, and as large, on every shard.

        Whatever is random in them follows from `seed`, `epoch` and the place in the global order alone, so that a
        resumed epoch, and a world of another size with the same global batch, sees the same data.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over a batch; `model` may be wrapped, for example in DistributedDataParallel."""

    @abstractmethod
    def evaluate(self, model: nn.Module, shard: Shard) -> Tensor:
        """Sums over this shard's test samples, a 1-d float64 CPU tensor; each sample is in exactly one shard."""

    @abstractmethod
    def metrics(self, sums: Tensor) -> dict[str, float]:
        """All metrics by name, from the sums of `evaluate` added up over all shards."""

    def state_dict(self) -> dict[str, Any]:
        """What `loss` carries from one batch to the next, of this shard; tensors and plain types."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:  # noqa: B027 (most tasks carry nothing)
        """Take over what `state_dict` gave."""


def global_order(num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits the samples: the same on every rank and for every world size."""
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def local_batches(num_samples: int, shard: Shard, batch_size: int, first: int = 0) -> Iterator[slice]:
    """The positions in the global order that make up each batch of a shard, from batch number `first` on.

    A global batch is `world_size * batch_size` neighbours in the order and rank r takes the r-th part of it, so two
    worlds with equal global batches train on equal data. What is left over at the end, less than one global batch, sits
    the epoch out: every rank then has the same number of equal batches, as averaging gradients over ranks presumes.
    """
    global_size = shard.world_size * batch_size
    for start in range(first * global_size, num_samples - global_size + 1, global_size):
        begin = start + shard.rank * batch_size
        yield slice(begin, begin + batch_size)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Put the model into evaluation mode, without gradients, and back at the end; gives the device that it is on."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield next(model.parameters()).device
    model.train(was_training)


def require_library(module: str, library: str, user: str) -> ModuleType:
    """Import a module of an optional library, when it is needed: that can take seconds.

    Raises:
        DataError: it is not installed; the message names what needs it, and the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(f"{user} needs {library} ({error}); pip install 'sidco_ddp[train]'") from error


def find_folder(source: DataSource, name: str, *, holds: str, remedy: str) -> Path:
    """The folder of the data set `name`: inside the data folder, or that folder itself.

    Args:
        source: where to look.
        name: of the folder.
        holds: what must be in it, a path relative to it.
        remedy: where the data comes from, for the message.

    Raises:
        DataError: there is none.
    """
    for folder in (source.data_dir / name, source.data_dir):
        if (folder / holds).exists():
            return folder
    raise DataError(
        f"--data-dir {str(source.data_dir)!r}: there is no {name}/{holds} in it; {remedy}, or give --synthetic"
    )
