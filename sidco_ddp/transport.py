"""The collectives, on opaque buffers: the only module that calls ``torch.distributed``'s.

Everything is posted when called. A collective posted from a future's callback hangs or aborts on Gloo as soon
as there are several buckets, so callers post in the hook's body and only decode in callbacks.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

# newer torch renames the collective and warns under the old name
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default group.

    Raises:
        RuntimeError: there is no default group yet.
    """
    if group is not None:
        return group
    if not dist.is_initialized():
        raise RuntimeError("no process group: call torch.distributed.init_process_group() before the first backward")
    return cast(dist.ProcessGroup, dist.group.WORLD)


def all_gather(message: Tensor, group: dist.ProcessGroup) -> Future[Tensor]:
    """Every rank's ``message`` (1-D, equal length everywhere), as a table with one row a rank."""
    size = group.size()
    if size == 1:
        return _done(message.unsqueeze(0))
    gathered = message.new_empty(size * message.numel())
    work = cast(dist.Work, _all_gather_single(gathered, message, group=group, async_op=True))

    def table(exchange: Future[object]) -> Tensor:
        exchange.value()  # raises what went wrong: a callback runs after a failure, too
        del held[:]
        return gathered.view(size, -1)

    held = [message]  # until the exchange is done
    return cast("Future[Tensor]", work.get_future().then(table))


def all_gather_now(row: list[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's ``row`` of integers, waited for: for rare agreements, and for exact exchanges."""
    return cast("list[list[int]]", all_gather(torch.tensor(row, device=device), group).wait().tolist())


def all_reduce_mean(buffer: Tensor, group: dist.ProcessGroup, num_contributors: int) -> Future[Tensor]:
    """Sum of every rank's ``buffer`` over ``num_contributors``, in place; scaled first, with plain DDP's factor."""
    if group.size() == 1:
        return _done(buffer)
    work = dist.all_reduce(buffer.mul_(1.0 / num_contributors), group=group, async_op=True)
    return cast("Future[Tensor]", work.get_future().then(lambda exchange: exchange.value()[0]))


def _done(value: Tensor) -> Future[Tensor]:
    """A completed future; on an accelerator it carries the event that a reader's stream must wait for."""
    future: Future[Tensor] = Future(devices=[] if value.device.type == "cpu" else [value.device])
    future.set_result(value)
    return future
