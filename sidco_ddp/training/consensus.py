"""What ranks must decide alike at the end of a step, agreed on behind its back."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from sidco_ddp.training.distributed import World


@dataclass(frozen=True)
class Decision:
    """What follows from the wishes of all ranks.

    Attributes:
        stop: the number of a signal that some rank got, or 0.
        save: some rank wants a checkpoint.
        written: no rank is still writing the last one.
    """

    stop: int
    save: bool
    written: bool


class Consensus:
    """One all-reduce of three numbers, posted before a step and read after it, so that nobody waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def post(self, *, stop: int, save: bool, writing: bool) -> None:
        """Tell the other ranks what this one wants. All ranks must do so at the same place."""
        wishes = torch.tensor([stop, save, writing], dtype=torch.float32, device=self._world.device)
        self._pending = wishes, dist.all_reduce(wishes, op=dist.ReduceOp.MAX, async_op=True)

    def read(self) -> Decision:
        """Wait for what was posted."""
        assert self._pending is not None, "nothing was posted"
        (wishes, work), self._pending = self._pending, None
        work.wait()
        stop, save, writing = wishes.tolist()
        return Decision(int(stop), bool(save), not writing)
