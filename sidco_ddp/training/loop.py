"""The training loop: steps, an evaluation an epoch, and what is recorded of both."""

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from sidco_ddp import SIDCoState
from sidco_ddp.training.distributed import World, copy_buffers_from_main, total
from sidco_ddp.training.interrupt import Interrupt
from sidco_ddp.training.progress import Progress
from sidco_ddp.training.record import RunRecord
from sidco_ddp.training.summary import CompressionTotals, compression_metrics
from sidco_ddp.workloads import Batch, Shard, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train. `total_steps` may end the run before its epochs are over."""

    epochs: int
    steps_per_epoch: int
    total_steps: int


def make_plan(
    *, num_samples: int, global_batch: int, epochs: int | None, steps: int | None, default_epochs: int
) -> Plan:
    """Settle the length of a run: the epochs, by default as many as the task wants or `steps` needs, cut at `steps`."""
    steps_per_epoch = num_samples // global_batch
    if epochs is None:
        epochs = max(default_epochs, math.ceil((steps or 0) / steps_per_epoch))
    all_steps = epochs * steps_per_epoch
    return Plan(epochs=epochs, steps_per_epoch=steps_per_epoch, total_steps=min(all_steps, steps or all_steps))


@dataclass(kw_only=True)
class Trainer:
    """Trains `model`, whose gradients the hook of `state` averages. Only the main rank has a `record`."""

    task: Task
    model: DistributedDataParallel
    state: SIDCoState
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    plan: Plan
    batch_size: int
    seed: int
    world: World
    record: RunRecord | None
    progress: Progress
    interrupt: Interrupt
    _totals: CompressionTotals = field(default_factory=CompressionTotals)
    _step_seconds: float = 0.0

    def run(self) -> dict[str, Any]:
        """Train as planned; returns what the run's summary says about it.

        `train_loss` is the mean over ranks and over the steps of the last epoch. `seconds` is all of the loop, and
        `samples_per_second` counts all ranks' samples over the time spent in training steps alone.
        """
        started = time.perf_counter()
        outcome: dict[str, Any] = {}
        epoch = 0
        with self.interrupt.deferred():
            while self._totals.steps < self.plan.total_steps:
                losses = self._train_epoch(epoch)
                epoch += 1
                outcome = self._evaluate(losses)
                self._report(epoch, outcome, time.perf_counter() - started)
        steps = self._totals.steps
        return {
            "steps": steps,
            "epochs": epoch,
            **outcome,
            **self._totals.summary(),
            "samples_per_second": self._samples(steps) / self._step_seconds,
            "seconds": time.perf_counter() - started,
        }

    def _train_epoch(self, epoch: int) -> list[float]:
        """Train one epoch, counted from 0, or what is planned of it; returns the losses of this rank."""
        shard = Shard(self.world.rank, self.world.world_size)
        losses: list[float] = []
        started = time.perf_counter()
        for batch in self.task.batches(seed=self.seed, epoch=epoch, shard=shard, batch_size=self.batch_size):
            self.interrupt.check()
            lr = float(self.schedule.get_last_lr()[0])
            loss = self._train_step(batch)
            seconds = time.perf_counter() - started
            losses.append(loss)
            self._record_step(epoch + 1, loss, lr, seconds)
            self.progress.step(loss)
            if self._totals.steps == self.plan.total_steps:
                break
            started = time.perf_counter()
        return losses

    def _train_step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model, tuple(part.to(self.world.device, non_blocking=True) for part in batch))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        return float(loss.item())  # last, so that the step's time holds all of a device's work

    def _record_step(self, epoch: int, loss: float, lr: float, seconds: float) -> None:
        compression = compression_metrics(self.state.stats())
        self._totals.add(compression)
        self._step_seconds += seconds
        if self.record is not None:
            step = {"step": self._totals.steps, "epoch": epoch, "loss": loss, "lr": lr}
            self.record.step({**step, **compression, "step_seconds": seconds})

    def _evaluate(self, losses: list[float]) -> dict[str, Any]:
        """Loss and metric over all ranks.

        The bare module is evaluated: DDP's forward copies buffers at every call, and ranks whose shards differ in
        size may differ in their number of calls.
        """
        module = self.model.module
        copy_buffers_from_main(module)
        local = self.task.evaluate(module, Shard(self.world.rank, self.world.world_size))
        sums = total(torch.cat([local, torch.tensor([sum(losses), len(losses)], dtype=torch.float64)]), self.world)
        return {
            "train_loss": float(sums[-2] / sums[-1]),
            "metric_name": self.task.metric_name,
            "metric": self.task.metric(sums[:-2]),
        }

    def _report(self, epoch: int, outcome: dict[str, Any], seconds: float) -> None:
        steps = self._totals.steps
        if self.record is not None:
            samples = self._samples(steps)
            self.record.evaluation({"step": steps, "epoch": epoch, **outcome, "samples": samples, "seconds": seconds})
            if not math.isfinite(outcome["train_loss"]):
                logger.warning("the training loss is not finite; a lower --lr may help")
        self.progress.epoch(
            f"epoch {epoch}/{self.plan.epochs}  step {steps}/{self.plan.total_steps}  "
            f"loss {outcome['train_loss']:.4f}  {self.task.metric_name} {outcome['metric']:.4f}  {seconds:.1f} s"
        )

    def _samples(self, steps: int) -> int:
        return steps * self.batch_size * self.world.world_size
