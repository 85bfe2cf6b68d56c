"""One call of the hook: one bucket in one step, from its gradient to the average over ranks."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidco_ddp import transport
from sidco_ddp.agreement import check_headers
from sidco_ddp.compressors.base import AbstractCompressor
from sidco_ddp.feedback import ErrorFeedback, is_finite
from sidco_ddp.layout import BucketLayout
from sidco_ddp.payload import SparsePayload
from sidco_ddp.stats import BucketStats
from sidco_ddp.target import Target
from sidco_ddp.wire import NONFINITE, VERSION, Header, WireFormat


@dataclass
class Slot:
    """What is remembered of the buckets of one layout."""

    layout: BucketLayout
    wire: WireFormat
    k: int
    dense: bool  # goes out whole: its message would not be smaller, or nothing is to be compressed
    memory: Any  # the compressor's state
    last_memory: Any = None  # the compressor's state before the last call

    @classmethod
    def make(
        cls,
        layout: BucketLayout,
        compressor: AbstractCompressor[Any],
        *,
        headroom: float,
        value_dtype: torch.dtype,
        dense_below: int,
    ) -> "Slot":
        """A slot with nothing remembered; ``dense_below`` is the message size from which a bucket goes out whole."""
        k = compressor.target_count(layout.numel)
        wire = WireFormat.for_count(layout.numel, k, headroom, value_dtype)
        dense = not compressor.sparse or wire.nbytes >= dense_below
        return cls(layout, wire, k, dense, compressor.init(layout.numel))


@dataclass
class Call:
    """What the hook does to one bucket, step by step; the hook says in which order."""

    slot: Slot
    compressor: AbstractCompressor[Any]
    feedback: ErrorFeedback
    group: dist.ProcessGroup
    step: int
    stats: BucketStats
    exact: bool  # messages as wide as the largest selection, instead of a fixed width
    flags: int = 0
    started: float = 0.0

    def compensate(self, gradient: Tensor) -> Target:
        """The target: gradient + residual, in float32, added up when the compressor looks at it."""
        return self.feedback.target(self.slot.layout, gradient)

    def compress(self, target: Target) -> SparsePayload:
        """The compressor's selection; nothing, and a flag for the other ranks, where the target is not finite."""
        slot, stats = self.slot, self.stats
        slot.last_memory = slot.memory
        payload, slot.memory = self.compressor.select(target, slot.memory)
        if not target.finite:
            self.flags |= NONFINITE
            return payload
        report = slot.memory.report
        stats.raw_khat, stats.stages, stats.rounds = report.raw_count, report.stages, report.rounds
        stats.touched, stats.threshold, stats.warm = report.touched, report.threshold, report.warm
        return payload

    def wire_for(self, payload: SparsePayload) -> WireFormat:
        """The message format: of fixed capacity, or as wide as the largest selection of all ranks."""
        wire = self.slot.wire
        if not self.exact:
            return wire
        counts = transport.all_gather_now([payload.count], self.group, payload.indices.device)
        return WireFormat(wire.numel, max(1, *(count for (count,) in counts)), wire.value_dtype)

    def record(self, sent: SparsePayload) -> None:
        """The residual is the target less what is sent."""
        self.stats.sent_khat = sent.count
        self.feedback.record(self.slot.layout, sent)

    def encode(self, wire: WireFormat, sent: SparsePayload) -> Tensor:
        """The message."""
        layout = self.slot.layout
        message = wire.encode(
            sent, Header(VERSION, self.flags, layout.fingerprint, layout.numel, sent.count, self.step)
        )
        self.stats.bytes_sent = message.numel()
        self._posted()
        return message

    def average(self, wire: WireFormat, gathered: Tensor, gradient: Tensor) -> Tensor:
        """The mean of all messages, in ``gradient``; NaN, and nothing remembered, where a rank's target was not finite.

        Raises:
            RuntimeError: the ranks exchanged different buckets.
        """
        headers = wire.headers(gathered)
        check_headers(headers, self.stats.bucket)
        if any(header.flags & NONFINITE for header in headers):
            self.slot.memory = self.slot.last_memory
            self.feedback.undo(self.slot.layout, gradient)
            gradient.fill_(torch.nan)
        else:
            wire.average(gathered, headers, out=gradient)
        return self._finished(gradient)

    def flush(self, gradient: Tensor) -> bool:
        """For a bucket that goes out whole: move its residual, if there is any, into the gradient."""
        flushed = self.compressor.sparse and self.feedback.flush(self.slot.layout, gradient)
        self.stats.raw_khat = self.stats.sent_khat = self.stats.elements
        self.stats.bytes_sent = self.stats.dense_bytes
        self._posted()
        return flushed

    def finish_dense(self, gradient: Tensor, flushed: bool) -> Tensor:
        """The mean as it is; a residual that went into a mean that is not finite is restored."""
        if flushed and not is_finite(gradient):
            self.feedback.undo(self.slot.layout, gradient)
        return self._finished(gradient)

    def _posted(self) -> None:
        now = time.perf_counter()
        self.stats.compress_seconds, self.started = now - self.started, now

    def _finished(self, gradient: Tensor) -> Tensor:
        self.stats.exchange_seconds = time.perf_counter() - self.started
        return gradient
