"""Which process this is among how many, on which device, and the process group that joins them."""

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: see process_group
from torch import nn
from torch.distributed.rendezvous import rendezvous

from sidco_ddp.training.errors import OptionError
from sidco_ddp.training.rendezvous import fresh_store

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
T = TypeVar("T")

_PATIENCE = timedelta(seconds=15)  # ranks start some seconds apart on a busy machine


@dataclass(frozen=True)
class World:
    """One process's place in the job."""

    rank: int
    world_size: int
    launched: bool  # a launcher gave the address to meet at; otherwise this process is alone
    device: torch.device
    backend: str
    local_rank: int = 0  # on its machine

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0


def find_world(device: str, backend: str, environment: Mapping[str, str] = os.environ) -> World:
    """Place this process by the launcher's environment variables, or alone in a world of one without them.

    What is refused here is refused alike on all ranks of a machine, so that none is left waiting for the others.
    """
    rank, world_size, launched = find_rank(environment)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("argument --device: 'cuda' is not available here; give --device cpu")
    if backend == "nccl" and device != "cuda":
        raise OptionError(f"argument --backend: 'nccl' does not serve device {device!r}; give --backend gloo")
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if device != "cuda":
        return World(rank, world_size, launched, torch.device(device), backend, local_rank)
    num_devices = torch.cuda.device_count()
    num_local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if num_local > num_devices:
        raise OptionError(
            f"argument --device: 'cuda' has {num_devices} device(s) here for {num_local} workers; "
            "start fewer workers on this machine, or give --device cpu"
        )
    return World(rank, world_size, launched, torch.device("cuda", local_rank), backend, local_rank)


@contextmanager
def process_group(world: World, timeout: timedelta | None = None) -> Iterator[dist.Store]:  # type: ignore[name-defined]
    """The default process group, from entry to exit; gives the store that its ranks share.

    An exchange that takes longer than `timeout`, by default torch's, raises on the ranks that wait for it.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.launched:
        store, _, _ = next(rendezvous("env://", world.rank, world.world_size))
        store = fresh_store(store, world.rank, world.world_size)
    else:  # there is no address to meet at, nor anyone to meet
        store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        world.backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timeout,
        device_id=world.device if world.backend == "nccl" else None,
    )
    try:
        yield store
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # which hold the model
        raise
    finally:
        # The group must end here. Where it lives on, its threads may be letting go of the last tensors when the
        # interpreter ends; they need the interpreter for that, and abort the process. Two things keep a group alive:
        # the reference cycles of a DDP model, and default arguments of torch.distributed.nn.functional, which hold the
        # group that there is when that module is imported; making a DDP model imports it, unless that was done before.
        gc.collect()
        dist.destroy_process_group()


def total(values: torch.Tensor, world: World) -> torch.Tensor:
    """The elementwise sum over ranks of a small float64 CPU tensor."""
    summed = values.to(world.device)
    dist.all_reduce(summed)
    return summed.cpu()


def together(action: Callable[[], T], world: World) -> T:
    """Do on every rank what may be refused on some of them only, and then refuse it on all.

    Raises:
        OptionError: on every rank, if `action` raised a `ValueError` or an `OSError` on any; the first one's message.
    """
    result, problem = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * world.world_size
    dist.all_gather_object(problems, problem)
    for rank, reported in enumerate(problems):
        if reported is not None:
            # What every rank has met needs no address.
            raise OptionError(reported if None not in problems else f"{reported} (on rank {rank})")
    return cast(T, result)


def from_main(action: Callable[[], T], world: World) -> T:
    """What the main rank gets, on every rank: what lies on its disk, for example, others may see late or not at all.

    Raises:
        OptionError: on every rank, if `action` raised a `ValueError` or an `OSError` on the main rank.
    """
    found: list[Any] = [together(action if world.is_main else lambda: None, world)]
    dist.broadcast_object_list(found, src=0)
    return cast(T, found[0])


def copy_buffers_from_main(module: nn.Module) -> None:
    """Give every rank the main rank's buffers, such as the running statistics of batch normalisation."""
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def leave_together(environment: Mapping[str, str] = os.environ) -> None:
    """Wait, but not for long, until all ranks have come here, with or without a process group.

    A launcher ends all ranks as soon as it sees one gone. The rank that reports why must have done so by then.
    """
    if dist.is_initialized():
        dist.barrier()
        return
    # Nothing that goes wrong in here is worth more words than the reason for leaving.
    with suppress(Exception):
        rank, world_size, _ = find_rank(environment)
        if world_size > 1:
            store, _, _ = next(rendezvous("env://", rank, world_size, timeout=_PATIENCE))
            store = fresh_store(store, rank, world_size, _PATIENCE)
            store.set(f"leaving/{rank}", "")
            store.wait([f"leaving/{other}" for other in range(world_size)], _PATIENCE)


def find_rank(environment: Mapping[str, str]) -> tuple[int, int, bool]:
    """Rank, world size, and whether a launcher set them: without one, this process is alone."""
    if "RANK" not in environment:
        return 0, 1, False
    missing = [name for name in _LAUNCHER_VARIABLES if name not in environment]
    if missing:
        raise OptionError(f"RANK is set but {', '.join(missing)} is not; start with torchrun, or unset RANK")
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError:
        rank, world_size = -1, 0
    if not 0 <= rank < world_size:
        raise OptionError(
            f"RANK={environment['RANK']!r} is not one of WORLD_SIZE={environment['WORLD_SIZE']!r} ranks; "
            "start with torchrun"
        )
    return rank, world_size, True
