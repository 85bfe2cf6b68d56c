"""Loss and metrics over all ranks, and whether they are good enough."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sidco_ddp.training.distributed import World, copy_buffers_from_main, total
from sidco_ddp.training.errors import OptionError
from sidco_ddp.training.plan import Plan
from sidco_ddp.training.summary import Totals
from sidco_ddp.workloads import Shard, Task


def evaluate(task: Task, module: nn.Module, totals: Totals, world: World) -> dict[str, Any]:
    """The mean training loss of the epoch so far, and the metrics on the test data, over all ranks.

    `module` is the bare one: DDP's forward copies buffers at every call, and ranks whose shards differ in size may
    differ in their number of calls.
    """
    copy_buffers_from_main(module)
    local = task.evaluate(module, Shard(world.rank, world.world_size))
    losses = torch.tensor([totals.epoch_loss, totals.epoch_steps], dtype=torch.float64)
    sums = total(torch.cat([local, losses]), world)
    metrics = task.metrics(sums[:-2])
    return {
        "train_loss": float(sums[-2] / sums[-1]),
        "metric_name": task.metric_name,
        "metric": metrics[task.metric_name],
        "metrics": metrics,
    }


def meets_target(task: Task, plan: Plan, outcome: Mapping[str, Any]) -> bool:
    """Whether an evaluation, if there was one, is as good as the plan's target, if it has one."""
    if plan.target is None or not outcome:
        return False
    metric: float = outcome["metric"]
    return metric >= plan.target if task.higher_is_better else metric <= plan.target


def refuse_a_target_that_is_met(task: Task, plan: Plan, untrained: Mapping[str, Any]) -> None:
    """Refuse a target in the wrong direction, or none at all.

    Raises:
        OptionError: the untrained model is as good as that.
    """
    if meets_target(task, plan, untrained):
        kind, remedy = ("lower", "higher") if task.higher_is_better else ("higher", "lower")
        raise OptionError(
            f"argument --target: {plan.target:g} is no goal: the untrained model has "
            f"{task.metric_name} {untrained['metric']:.4g}, and a {kind} one is worse; give a {remedy} target"
        )


def target_summary(task: Task, plan: Plan, totals: Totals) -> dict[str, Any]:
    """What a run's summary says of its target, if it has one: what it took to reach it, or None where it did not."""
    if plan.target is None:
        return {}
    reached = meets_target(task, plan, totals.outcome)
    spent = {"seconds": totals.evaluated_seconds, "steps": totals.steps, "bytes": totals.bytes_sent}
    return {"target": plan.target, **{f"target_{name}": value if reached else None for name, value in spent.items()}}
