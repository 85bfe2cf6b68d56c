"""Models, data and recipes to train: one task a file, every task in `TASKS`."""

from collections.abc import Callable

from sidco_ddp.workloads.base import Batch, Recipe, Shard, Task, global_order, local_batches
from sidco_ddp.workloads.digits import Digits

__all__ = ["TASKS", "Batch", "Recipe", "Shard", "Task", "global_order", "local_batches", "make_task"]

TASKS: dict[str, Callable[[], Task]] = {
    "digits": Digits,
}


def make_task(name: str) -> Task:
    """Build the task called `name`; an unknown name is a `ValueError` that lists the known ones."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; choose from {', '.join(TASKS)}")
    return TASKS[name]()
