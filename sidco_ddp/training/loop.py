"""The training loop: steps, evaluations, and what is recorded of both."""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from sidco_ddp import SIDCoState
from sidco_ddp.training.checkpoints import Checkpoints
from sidco_ddp.training.consensus import Consensus, Decision
from sidco_ddp.training.distributed import World
from sidco_ddp.training.errors import RunError
from sidco_ddp.training.evaluation import evaluate, meets_target, refuse_a_target_that_is_met, target_summary
from sidco_ddp.training.interrupt import Interrupt
from sidco_ddp.training.plan import Plan
from sidco_ddp.training.progress import Progress
from sidco_ddp.training.record import RunRecord
from sidco_ddp.training.replicas import check_replicas
from sidco_ddp.training.resume import snapshot
from sidco_ddp.training.schedules import Schedule, warmup_ratio
from sidco_ddp.training.summary import Totals, compression_metrics
from sidco_ddp.workloads import Batch, Shard, Task

logger = logging.getLogger(__name__)


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
    checkpoints: Checkpoints | None = None
    check_replicas_every: int = 0  # steps; 0: never
    totals: Totals = field(default_factory=Totals)
    _started: float = field(default_factory=time.perf_counter)

    def run(self) -> dict[str, Any]:
        """Train as planned; returns what the run's summary says about it.

        `train_loss` is the mean over ranks and over the steps of the last epoch. `seconds` is all of the loop, and
        `samples_per_second` counts all ranks' samples over the time spent in training steps alone.

        Raises:
            KeyboardInterrupt: on all ranks after the same step, when a signal asked any of them to stop.
            OptionError: the target is none.
            RunError: the ranks' parameters differ.
        """
        with self.interrupt.deferred():
            if self.plan.target is not None and self.totals.steps == 0:
                untrained = evaluate(self.task, self.model.module, self.totals, self.world)
                refuse_a_target_that_is_met(self.task, self.plan, untrained)
            if self._is_evaluation_owed:
                self._end_step()
            while not self._is_finished:
                self._train_epoch()
            saved = {} if self.checkpoints is None else {"saved": self._save()}
        return {
            "steps": self.totals.steps,
            "epochs": self.totals.epochs_begun,
            **self.totals.outcome,
            **self.totals.summary(),
            "samples_per_second": self.totals.samples / self.totals.step_seconds,
            "seconds": self._seconds,
            **target_summary(self.task, self.plan, self.totals),
            **saved,
        }

    def totals_now(self) -> Totals:
        """What the run has come to, the time included."""
        return replace(self.totals, seconds=self._seconds)

    @property
    def _seconds(self) -> float:
        return self.totals.seconds + time.perf_counter() - self._started

    @property
    def _is_evaluation_owed(self) -> bool:
        """Whether the run was ended by a signal, and saved, between a step and what comes at the end of that step."""
        at_the_end = self.totals.steps == self.plan.max_steps and self.totals.evaluated_step != self.totals.steps
        return self.totals.batch == self.plan.steps_per_epoch or at_the_end

    @property
    def _is_finished(self) -> bool:
        out_of_steps = self.plan.max_steps is not None and self.totals.steps >= self.plan.max_steps
        return (
            self.totals.epoch >= self.plan.epochs
            or out_of_steps
            or meets_target(self.task, self.plan, self.totals.outcome)
        )

    def _train_epoch(self) -> None:
        """Train the rest of the epoch in which the run stands, or what is planned of it."""
        totals, consensus = self.totals, Consensus(self.world)
        self.state.ratio = warmup_ratio(self.ratio, totals.epoch, self.ratio_warmup_epochs)
        batches = self.task.batches(
            seed=self.seed,
            epoch=totals.epoch,
            shard=Shard(self.world.rank, self.world.world_size),
            batch_size=self.task.recipe.batch_size,
            first=totals.batch,
        )
        started = time.perf_counter()
        for batch in batches:
            consensus.post(**self._wishes())
            self._train_step(batch, started)
            if self.check_replicas_every and totals.steps % self.check_replicas_every == 0:
                check_replicas(self.model.module, totals.steps)
            decision = consensus.read()
            if decision.stop:
                self._stop(decision.stop)  # before an evaluation, which may take longer than there is time to leave
            self._end_step()
            self._follow(decision)
            if self._is_finished or totals.batch == 0:
                break
            started = time.perf_counter()

    def _train_step(self, batch: Batch, started: float) -> None:
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
        epoch = self.totals.epoch + 1
        self.totals.add(value, self.task.recipe.batch_size * self.world.world_size, ended - started, compression)
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

    def _end_step(self) -> None:
        """Evaluate where that is due, and go to the next epoch where this one is over."""
        epoch_is_over = self.totals.batch == self.plan.steps_per_epoch
        every = self.task.recipe.evaluate_every
        last = self.totals.steps == self.plan.max_steps or (epoch_is_over and self.totals.epoch + 1 == self.plan.epochs)
        if last or (epoch_is_over and (self.totals.epoch + 1) % every == 0):
            self.totals.outcome = evaluate(self.task, self.model.module, self.totals, self.world)
            self.totals.evaluated_step, self.totals.evaluated_seconds = self.totals.steps, self._seconds
            self._report(self.totals.outcome)
            if epoch_is_over:
                watched = self.task.watched_metric
                outcome = self.totals.outcome
                self.schedule.end_epoch(outcome["metrics"][watched] if watched else outcome["train_loss"])
        if epoch_is_over:
            self.totals.end_epoch()

    def _report(self, outcome: Mapping[str, Any]) -> None:
        """Tell the record and the reader of an evaluation."""
        steps, epoch, seconds = self.totals.steps, self.totals.epochs_begun, self.totals.evaluated_seconds
        if self.record is not None:
            reached = {"samples": self.totals.samples, "bytes_sent": self.totals.bytes_sent, "seconds": seconds}
            self.record.evaluation({"step": steps, "epoch": epoch, **outcome, **reached})
            if not math.isfinite(outcome["train_loss"]):
                logger.warning("the training loss is not finite; a lower --lr may help")
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in outcome["metrics"].items())
        self.progress.epoch(
            f"epoch {epoch}/{self.plan.epochs}  step {steps}/{self.plan.total_steps}  "
            f"loss {outcome['train_loss']:.4f}  {metrics}  {seconds:.1f} s"
        )

    def _wishes(self) -> dict[str, Any]:
        """What this rank wants to happen after the coming step."""
        saves = self.checkpoints
        due = saves is not None and saves.is_due(self.totals.steps + 1)
        writing = saves is not None and not saves.is_written
        return {"stop": self.interrupt.requested, "save": due, "writing": writing}

    def _follow(self, decision: Decision) -> None:
        """Do what the ranks have agreed on."""
        if self.checkpoints is not None:
            if self.checkpoints.is_writing and (decision.written or decision.save):
                self.checkpoints.finish()
            if decision.save:
                self.checkpoints.start(self.totals.steps, lambda: snapshot(self))

    def _stop(self, number: int) -> None:
        """Save, and end the run as a signal asked for."""
        steps = self.totals.steps
        if self.checkpoints is not None and not self._save():
            raise RunError(f"signal {number} ends the run after step {steps}, which could not be saved")
        logger.info("signal %d ends the run after step %d", number, steps)
        self.interrupt.stop(number)

    def _save(self) -> bool:
        assert self.checkpoints is not None
        return self.checkpoints.save(self.totals.steps, lambda: snapshot(self))
