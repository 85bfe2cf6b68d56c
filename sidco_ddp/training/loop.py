"""The training loop: steps, evaluations, and what is recorded of both."""

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from sidco_ddp import SIDCoState
from sidco_ddp.training.distributed import World, copy_buffers_from_main, total
from sidco_ddp.training.errors import OptionError
from sidco_ddp.training.interrupt import Interrupt
from sidco_ddp.training.progress import Progress
from sidco_ddp.training.record import RunRecord
from sidco_ddp.training.schedules import Schedule, warmup_ratio
from sidco_ddp.training.summary import Totals, compression_metrics
from sidco_ddp.workloads import Batch, Shard, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train. `total_steps` may end the run before its epochs are over; so may a metric of `target`."""

    epochs: int
    steps_per_epoch: int
    total_steps: int
    target: float | None = None


@dataclass(kw_only=True)
class Trainer:
    """Trains `model`, whose gradients the hook of `state` averages. Only the main rank has a `record`."""

    task: Task
    model: DistributedDataParallel
    state: SIDCoState
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    plan: Plan
    ratio: float  # after a warm-up over so many epochs:
    ratio_warmup_epochs: int
    seed: int
    world: World
    record: RunRecord | None
    progress: Progress
    interrupt: Interrupt
    totals: Totals = field(default_factory=Totals)
    _started: float = 0.0

    def run(self) -> dict[str, Any]:
        """Train as planned; returns what the run's summary says about it.

        `train_loss` is the mean over ranks and over the steps of the last epoch. `seconds` is all of the loop, and
        `samples_per_second` counts all ranks' samples over the time spent in training steps alone.
        """
        self._started = time.perf_counter()
        outcome: dict[str, Any] = {}
        reached = False
        with self.interrupt.deferred():
            self._refuse_a_target_met_untrained()
            while self.totals.steps < self.plan.total_steps and not reached:
                self._train_epoch()
                if self._is_evaluation_due():
                    outcome = self._evaluate()
                    self._report(outcome)
                    reached = self._is_target_met(outcome["metric"])
        seconds = self._seconds
        return {
            "steps": self.totals.steps,
            "epochs": self._epochs_begun,
            **outcome,
            **self.totals.summary(),
            "samples_per_second": self._samples / self.totals.step_seconds,
            "seconds": seconds,
            **self._target_summary(seconds if reached else None),
        }

    @property
    def _epochs_begun(self) -> int:
        return math.ceil(self.totals.steps / self.plan.steps_per_epoch)

    @property
    def _samples(self) -> int:
        return self.totals.steps * self.task.recipe.batch_size * self.world.world_size

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def _train_epoch(self) -> None:
        """Train the rest of the epoch in which the run stands, or what is planned of it."""
        epoch, done = divmod(self.totals.steps, self.plan.steps_per_epoch)
        if done == 0:
            self.totals.start_epoch()
        self.state.ratio = warmup_ratio(self.ratio, epoch, self.ratio_warmup_epochs)
        shard = Shard(self.world.rank, self.world.world_size)
        batches = self.task.batches(
            seed=self.seed, epoch=epoch, shard=shard, batch_size=self.task.recipe.batch_size, first=done
        )
        started = time.perf_counter()
        for batch in batches:
            self.interrupt.check()
            self._train_step(batch, epoch + 1, started)
            if self.totals.steps == self.plan.total_steps:
                break
            started = time.perf_counter()

    def _train_step(self, batch: Batch, epoch: int, started: float) -> None:
        """One optimizer step; `started` is when its batch was asked for. Times are the host's."""
        lr, loaded = self.schedule.lr, time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model, tuple(part.to(self.world.device, non_blocking=True) for part in batch))
        loss.backward()  # type: ignore[no-untyped-call]
        computed = time.perf_counter()
        if self.task.recipe.clip_norm is not None:
            clip_grad_norm_(self.model.parameters(), self.task.recipe.clip_norm)  # of the average: after the exchange
        self.optimizer.step()
        self.schedule.step()
        value = float(loss.item())  # last, so that the step's time holds all of a device's work
        ended = time.perf_counter()
        compression = compression_metrics(self.state.stats())
        self.totals.add(value, ended - started, compression)
        if self.record is not None:
            hook_seconds = compression["compress_seconds"] + compression["exchange_seconds"]
            step = {"step": self.totals.steps, "epoch": epoch, "loss": value, "lr": lr, "ratio": self.state.ratio}
            times = {
                "data_seconds": loaded - started,
                "compute_seconds": max(0.0, computed - loaded - hook_seconds),
                "optimizer_seconds": ended - computed,
                "step_seconds": ended - started,
            }
            self.record.step({**step, **compression, **times})
        self.progress.step(value)

    def _is_evaluation_due(self) -> bool:
        if self.totals.steps == self.plan.total_steps:
            return True
        return self._epochs_begun % self.task.recipe.evaluate_every == 0

    def _evaluate(self) -> dict[str, Any]:
        """Loss and metrics over all ranks.

        The bare module is evaluated: DDP's forward copies buffers at every call, and ranks whose shards differ in
        size may differ in their number of calls.
        """
        module = self.model.module
        copy_buffers_from_main(module)
        local = self.task.evaluate(module, Shard(self.world.rank, self.world.world_size))
        losses = torch.tensor([self.totals.epoch_loss, self.totals.epoch_steps], dtype=torch.float64)
        sums = total(torch.cat([local, losses]), self.world)
        metrics = self.task.metrics(sums[:-2])
        return {
            "train_loss": float(sums[-2] / sums[-1]),
            "metric_name": self.task.metric_name,
            "metric": metrics[self.task.metric_name],
            "metrics": metrics,
        }

    def _report(self, outcome: dict[str, Any]) -> None:
        """Tell the schedule, the record and the reader of an evaluation."""
        steps, epoch, seconds = self.totals.steps, self._epochs_begun, self._seconds
        watched = self.task.watched_metric
        self.schedule.end_epoch(outcome["metrics"][watched] if watched else outcome["train_loss"])
        if self.record is not None:
            reached = {"samples": self._samples, "bytes_sent": self.totals.bytes_sent, "seconds": seconds}
            self.record.evaluation({"step": steps, "epoch": epoch, **outcome, **reached})
            if not math.isfinite(outcome["train_loss"]):
                logger.warning("the training loss is not finite; a lower --lr may help")
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in outcome["metrics"].items())
        self.progress.epoch(
            f"epoch {epoch}/{self.plan.epochs}  step {steps}/{self.plan.total_steps}  "
            f"loss {outcome['train_loss']:.4f}  {metrics}  {seconds:.1f} s"
        )

    def _is_target_met(self, metric: float) -> bool:
        if self.plan.target is None:
            return False
        return metric >= self.plan.target if self.task.higher_is_better else metric <= self.plan.target

    def _refuse_a_target_met_untrained(self) -> None:
        if self.plan.target is None or self.totals.steps > 0:
            return
        metric = self._evaluate()["metric"]
        if self._is_target_met(metric):
            kind, remedy = ("lower", "higher") if self.task.higher_is_better else ("higher", "lower")
            raise OptionError(
                f"argument --target: {self.plan.target:g} is no goal: the untrained model has "
                f"{self.task.metric_name} {metric:.4g}, and a {kind} one is worse; give a {remedy} target"
            )

    def _target_summary(self, seconds: float | None) -> dict[str, Any]:
        """What it took to reach the target; None where it was not reached."""
        if self.plan.target is None:
            return {}
        spent = {"seconds": seconds, "steps": self.totals.steps, "bytes": self.totals.bytes_sent}
        reached = seconds is not None
        return {
            "target": self.plan.target,
            **{f"target_{name}": value if reached else None for name, value in spent.items()},
        }
