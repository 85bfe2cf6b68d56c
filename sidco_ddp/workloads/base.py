"""What a task is, and the one rule by which all tasks deal their data out to the workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


class Shard(NamedTuple):
    """The part of the data that one worker sees: every `world_size`-th portion, from `rank` on."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings a task trains well with; each can be overridden on the command line or by the caller."""

    epochs: int
    batch_size: int  # per worker
    lr: float
    optimizer: str  # a name in `sidco_ddp.training.optimizers.OPTIMIZERS`
    momentum: float
    weight_decay: float
    warmup_epochs: float  # the learning rate climbs linearly over these, then falls along a half cosine


class Task(Protocol):
    """A model, its data, its loss and its metric.

    A task knows no process group: it is told its shard, and hands back sums that add up over the shards.
    """

    name: str
    recipe: Recipe
    metric_name: str
    higher_is_better: bool

    @property
    def num_train_samples(self) -> int:
        """How many samples one epoch draws from, over all shards together."""

    def make_model(self) -> nn.Module:
        """A new model, initialised from torch's global random state."""

    def batches(self, *, seed: int, epoch: int, shard: Shard, batch_size: int) -> Iterator[Batch]:
        """This shard's batches of an epoch, on the CPU; as many, and as large, on every shard."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over a batch; `model` may be wrapped, for example in DistributedDataParallel."""

    def evaluate(self, model: nn.Module, shard: Shard) -> Tensor:
        """Sums over this shard's test samples, a 1-d float64 CPU tensor; each sample is in exactly one shard."""

    def metric(self, sums: Tensor) -> float:
        """The metric, from the sums of `evaluate` added up over all shards."""


def global_order(num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits the samples: the same on every rank and for every world size."""
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def local_batches(num_samples: int, shard: Shard, batch_size: int) -> Iterator[slice]:
    """The positions in the global order that make up each batch of a shard.

    A global batch is `world_size * batch_size` neighbours in the order and rank r takes the r-th part of it, so two
    worlds with equal global batches train on equal data. What is left over at the end, less than one global batch, sits
    the epoch out: every rank then has the same number of equal batches, as averaging gradients over ranks presumes.
    """
    global_size = shard.world_size * batch_size
    for start in range(0, num_samples - global_size + 1, global_size):
        first = start + shard.rank * batch_size
        yield slice(first, first + batch_size)
