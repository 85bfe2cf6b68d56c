"""What of a run goes into a checkpoint, and how a run goes on from one."""

import hashlib
import logging
import math
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sidco_ddp.redistribute import redistribute
from sidco_ddp.training.checkpoints.reader import Loaded
from sidco_ddp.training.distributed import World
from sidco_ddp.training.schedules import warmup_ratio
from sidco_ddp.workloads import Shard, Task

if TYPE_CHECKING:
    from sidco_ddp.training.loop import Trainer

logger = logging.getLogger(__name__)


def snapshot(trainer: "Trainer") -> tuple[dict[str, Any], dict[str, Any]]:
    """Copies, on the CPU, of what is the same on all ranks (for the main rank to write), and of this rank's own."""
    shared: dict[str, Any] = {}
    if trainer.world.is_main:
        shared = {
            "model": trainer.model.module.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "schedule": trainer.schedule.state_dict(),
            "batch": trainer.task.recipe.batch_size,
        }
    own = {
        "totals": trainer.totals_now().state_dict(),
        "task": trainer.task.state_dict(),
        "random": random_state(trainer.world.device),
    }
    hook = _on_cpu(trainer.state.state_dict(), copy=False)  # which are copies already, as large as the model
    return _on_cpu(shared), {"hook": hook, **_on_cpu(own)}


def restore(trainer: "Trainer", loaded: Loaded) -> None:
    """Put a run where a checkpoint was made, or, in a world of another size, as near as that can be."""
    world, saved_size = trainer.world, loaded.manifest.world_size
    own, shared = loaded.template, loaded.shared
    trainer.model.module.load_state_dict(shared["model"])
    # Momenta and the like are the checkpoint's; the settings are those that were asked for now.
    wanted = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    trainer.optimizer.load_state_dict(shared["optimizer"])
    for group, settings in zip(trainer.optimizer.param_groups, wanted, strict=True):
        group.update(settings)
    trainer.schedule.load_state_dict(shared["schedule"])
    totals = trainer.totals
    totals.load_state_dict(own["totals"])
    old_global, new_global = shared["batch"] * saved_size, trainer.task.recipe.batch_size * world.world_size
    if new_global != old_global:
        # The first whole batch that has not been seen; never a whole epoch, which would miss its evaluation.
        totals.batch = min(math.ceil(totals.batch * old_global / new_global), trainer.plan.steps_per_epoch - 1)
    trainer.schedule.resume(totals.epoch * trainer.plan.steps_per_epoch + totals.batch)
    trainer.state.ratio = warmup_ratio(trainer.ratio, totals.epoch, trainer.ratio_warmup_epochs)
    if saved_size == world.world_size:
        trainer.state.load_state_dict(own["hook"])
        set_random_state(own["random"], world.device)
        if new_global == old_global:
            trainer.task.load_state_dict(own["task"])
    else:
        states = [part["hook"] for part in loaded.own]
        trainer.state.load_state_dict(
            redistribute(states, own["hook"], world_size=world.world_size, saved_world_size=saved_size)
        )
        seed_rank(trainer.seed, world, totals.steps)
    if world.is_main:
        logger.info("going on from %s, after step %d", loaded.path, totals.steps)
        if saved_size != world.world_size:
            logger.info(
                "it was made by %d ranks, there are %d now: the residuals were dealt out so that their mean is the "
                "same, random states are new",
                saved_size,
                world.world_size,
            )
        if new_global != old_global:
            logger.info(
                "the global batch was %d samples and is %d: the data goes on at sample %d of epoch %d",
                old_global,
                new_global,
                totals.batch * new_global,
                totals.epoch + 1,
            )


def settle_buckets(model: DistributedDataParallel, task: Task, world: World, seed: int) -> None:
    """Make DDP arrange its buckets as they were when the run was broken off; nothing else comes of it.

    DDP orders parameters anew after the first backward pass. What is selected hangs on the buckets: the first step
    after a restart would select in others than the same step of an uninterrupted run. What this pass leaves in buffers
    and random states is overwritten by the checkpoint. To be called before the hook is registered.
    """
    shard = Shard(world.rank, world.world_size)
    batch = next(task.batches(seed=seed, epoch=0, shard=shard, batch_size=task.recipe.batch_size))
    carried = task.state_dict()
    task.loss(model, tuple(part.to(world.device) for part in batch)).backward()  # type: ignore[no-untyped-call]
    task.load_state_dict(carried)
    model.zero_grad(set_to_none=True)


def seed_rank(seed: int, world: World, step: int = 0) -> None:
    """Give each rank random numbers of its own, for example for dropout."""
    digest = hashlib.sha256(f"{seed}/{world.rank}/{world.world_size}/{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "big"))


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of all global random generators, as tensors and plain types."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(place), int(has_gauss), float(gauss)],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Undo :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def fingerprint(model: nn.Module) -> str:
    """A short text that differs for models with other parameters or buffers, by name, shape or dtype."""
    entries = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in model.state_dict().items()]
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]


def _on_cpu(value: Any, *, copy: bool = True) -> Any:
    """Tensors on the CPU, in nested plain types; without `copy`, those that are there are taken as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=copy)
    if isinstance(value, Mapping):
        return {name: _on_cpu(item, copy=copy) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(item, copy=copy) for item in value)
    return value
