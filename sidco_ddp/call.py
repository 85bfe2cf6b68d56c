"""One call of the hook: one bucket in one step, from its gradient to the average over ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sidco_ddp import transport
from sidco_ddp.agreement import PeerError, check_failures, check_headers
from sidco_ddp.compressors.base import AbstractCompressor
from sidco_ddp.feedback import ErrorFeedback, is_finite
from sidco_ddp.payload import SparsePayload, empty
from sidco_ddp.slots import Slot
from sidco_ddp.stats import BucketStats
from sidco_ddp.target import Target
from sidco_ddp.wire import DRAW_MASK, FAILED, NONFINITE, VERSION, Header, WireFormat


@dataclass
class Call:
    """What the hook does to one bucket, step by step; the hook says in which order."""

    slot: Slot
    compressor: AbstractCompressor[Any]
    feedback: ErrorFeedback
    group: dist.ProcessGroup
    step: int
    stats: BucketStats
    buffer: Tensor  # the bucket's; overwritten with the average
    gradient: Tensor  # the same memory, real-valued
    idle: list[str]  # parameters that the backward did not reach
    loss_scale: float  # by which the gradient is too large
    num_contributors: int  # the ranks among which the sum is divided
    exact: bool  # messages as wide as the largest selection, instead of a fixed width
    guarded: bool  # the step may be undone as a whole, so every bucket's result is looked at
    started: float
    finished: bool = False  # the average has arrived
    undone: bool = False
    shared: Tensor | None = None  # this rank's indices, where they are every rank's and do not travel
    _wire: WireFormat | None = None
    _target: Target | None = None
    _sent: SparsePayload | None = None
    _changed: bool = False  # the residual
    _compressed: bool = False
    _overwritten: bool = False  # the bucket, and with it a parked residual
    _lock: Any = field(default_factory=RLock)

    def compensate(self) -> Target:
        """The target: unscaled gradient + residual, in float32, added up when the compressor looks at it."""
        factor = 1.0 / self.loss_scale
        self._target = self.feedback.target(self.slot.layout, self.gradient, factor=factor, idle=self.idle)
        return self._target

    def compress(self, target: Target) -> SparsePayload:
        """The compressor's selection; nothing where the target is not finite, which :meth:`encode` tells the others."""
        slot, stats = self.slot, self.stats
        slot.last_memory, self._compressed = slot.memory, True
        payload, slot.memory = self.compressor.select(target, slot.memory)
        if not target.finite:
            stats.finite = False
            return payload
        report = slot.memory.report
        stats.raw_khat, stats.stages, stats.rounds = report.raw_count, report.stages, report.rounds
        stats.touched, stats.threshold, stats.warm = report.touched, report.threshold, report.warm
        return payload

    def wire_for(self, payload: SparsePayload) -> WireFormat:
        """The message format: of fixed capacity, or as wide as the largest selection of all ranks."""
        wire = self.slot.wire
        if self.exact:
            counts = [count for (count,) in self._gather([payload.count])]
            check_failures([count < 0 for count in counts], self.stats.bucket, self.step)
            wire = replace(wire, capacity=max(1, *counts))
        self._wire = wire
        return wire

    def fit(self, wire: WireFormat, payload: SparsePayload) -> SparsePayload:
        """What is sent: all that fits the message; and no value, scaled again, is beyond the bucket's dtype."""
        return wire.fit(payload, torch.finfo(self.gradient.dtype).max / self.loss_scale)

    def record(self, sent: SparsePayload) -> None:
        """The residual is the target less what is sent."""
        self.stats.sent_khat = sent.count
        self.feedback.record(self.slot.layout, sent)
        self._sent, self._changed = sent, True

    def encode(self, wire: WireFormat, sent: SparsePayload) -> Tensor:
        """The message."""
        if not wire.with_indices:
            self.shared = sent.indices
        message = wire.encode(sent, self._header(0 if self.stats.finite else NONFINITE, sent.count))
        self.stats.bytes_sent = message.numel()
        self._posted()
        return message

    def average(self, wire: WireFormat, exchange: Future[Tensor]) -> Tensor:
        """The mean of all messages, in ``gradient``; NaN, and nothing remembered, where a rank's target was not finite.

        Raises:
            RuntimeError: the exchange failed, a rank raised an error, or the ranks exchanged different buckets.
        """
        try:
            self._combine(wire, self._result(exchange))
        except Exception:
            self.undo()  # now: DDP's next backward overwrites what it needs
            raise
        self._finished()
        return self.buffer

    def _combine(self, wire: WireFormat, gathered: Tensor) -> None:
        headers = wire.headers(gathered)
        check_failures([bool(header.flags & FAILED) for header in headers], self.stats.bucket, self.step)
        check_headers(headers, self.stats.bucket)
        if any(header.flags & NONFINITE for header in headers):
            self.stats.finite = False
            self.undo()
            self.gradient.fill_(torch.nan)
            return
        with self._lock:
            if self.undone:  # the backward was broken off while the exchange was under way
                return
            self._overwritten = True
            factor = self.loss_scale / self.num_contributors
            wire.combine(gathered, headers, self.gradient, factor, self.shared)

    def flush(self) -> Tensor:
        """For a bucket that goes out whole: the gradient, with its residual moved in if there is one."""
        if self.compressor.sparse and not self.gradient.is_sparse:
            factor = 1.0 / self.loss_scale
            self._changed = self.feedback.flush(self.slot.layout, self.gradient, factor=factor, idle=self.idle)
        self.stats.raw_khat = self.stats.sent_khat = self.stats.elements
        self.stats.bytes_sent = self.stats.dense_bytes
        self._posted()
        return self.gradient

    def finish_dense(self, exchange: Future[Tensor]) -> Tensor:
        """The mean as it is; a residual that went into a mean that is not finite is restored."""
        mean = self._result(exchange)
        if self._changed or self.guarded:
            self.stats.finite = is_finite(mean)
        self._finished()
        return mean if mean.is_sparse else self.buffer

    def undo(self) -> None:
        """Forget the call: residual and compressor state are as before it.

        Once the average is in the bucket, the old residual is only there where buckets have a spare buffer. Elsewhere
        what was sent is put back, so that the gradient comes later instead of being lost.
        """
        with self._lock:  # the average comes in a thread of the transport's
            if not self.undone:
                self._undo()
            self.undone = True

    def _undo(self) -> None:
        if self._target is None or not self.feedback.parks(self.gradient):
            if self._changed:
                self.feedback.undo(self.slot.layout, self.gradient)
        elif not self._overwritten:
            if self._target.written:
                self.feedback.undo(self.slot.layout, self.gradient)
        elif self._sent is not None:
            self.feedback.put_back(self.slot.layout, self._sent)
        self.feedback.bring_back(self.slot.layout)
        if self._compressed:
            self.slot.memory = self.slot.last_memory

    @contextmanager
    def failure_told(self) -> Iterator[None]:
        """An error in here reaches the other ranks, which would wait for this rank's message, and then the user."""
        try:
            yield
        except Exception as error:
            self.undo()
            if not isinstance(error, PeerError):  # of which, in an exact exchange, the counts have told
                with suppress(Exception):  # the error itself is what the user must see
                    self._tell_failure()
            raise

    def _tell_failure(self) -> None:
        if self.exact and self._wire is None:
            self._gather([-1])
        else:
            wire = self._wire or self.slot.wire
            nothing = empty(self.gradient[:0].float())
            transport.all_gather(wire.encode(nothing, self._header(FAILED, 0)), self.group).wait()

    def _header(self, flags: int, num_entries: int) -> Header:
        layout = self.slot.layout
        memory = self.slot.last_memory
        draw = 0 if memory is None else self.compressor.shared_draw(memory) & DRAW_MASK
        return Header(VERSION, flags, layout.fingerprint, layout.numel, num_entries, self.step, draw)

    def _gather(self, row: list[int]) -> list[list[int]]:
        return transport.all_gather_now(row, self.group, self.gradient.device)

    def _posted(self) -> None:
        now = time.perf_counter()
        self.stats.compress_seconds, self.started = now - self.started, now

    def _result(self, exchange: Future[Tensor]) -> Tensor:
        try:
            return exchange.value()
        except RuntimeError as error:
            raise RuntimeError(
                f"the exchange of bucket {self.stats.bucket} in step {self.step} failed, probably since another rank "
                f"did; the first error of any rank is the one to look at: {error}"
            ) from error

    def _finished(self) -> None:
        if not self.stats.finite:
            self.undo()
        self.finished = True
        self.stats.exchange_seconds = time.perf_counter() - self.started
