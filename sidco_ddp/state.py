"""What the hook remembers between calls: options, residuals, compressor states, the step, and their checkpoint."""

import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidco_ddp import transport
from sidco_ddp.agreement import agree
from sidco_ddp.call import Call, Slot
from sidco_ddp.checkpoint import FORMAT, check_format, from_plain, to_plain, warn_about_names
from sidco_ddp.compressors import make_compressor
from sidco_ddp.compressors.base import AbstractCompressor
from sidco_ddp.feedback import ErrorFeedback
from sidco_ddp.kernels import check_kernels
from sidco_ddp.layout import BucketLayout, ParameterNames
from sidco_ddp.options import check_choice, check_count, check_flag, check_number
from sidco_ddp.owner import owner, reduced_parameters
from sidco_ddp.stats import BucketStats, summarise
from sidco_ddp.wire import VERSION

VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SIDCoState:
    """State of :func:`sidco_hook`, one for each DDP module.

    Building it touches neither a device nor a process group, so it may be built before ``init_process_group``.

    Args:
        compressor: a name in ``COMPRESSORS``, or an instance from ``make_compressor``.
        ratio: fraction of the entries sent, in (0, 1]; 0.001 unless given. An instance brings its own.
        process_group: the group to average over; by default the DDP module's own.
        dense_steps: first steps that go out whole, as with plain DDP.
        headroom: room in a message beyond k, as a share of k.
        value_dtype: torch.float32, torch.float16 or torch.bfloat16: what values are on the wire. The cast's error
            stays in the residual.
        error_feedback: keep what was not sent for the next step. Without it the gradient is biased.
        exchange: ``"fixed"`` sends messages of fixed size in one all_gather; ``"exact"`` gathers the counts first
            and then messages of the largest count, for schemes that do not hold their count.
        dense_fallback: send a bucket whole when its message would not be smaller than the bucket.
        kernels: what compensates and looks for exceedances: ``"torch"``, ``"numba"`` (CPU), ``"triton"`` (CUDA), or the
            fastest that is installed.
        named_parameters: names for the residuals; by default the DDP module's own.

    Raises:
        ValueError: an option is out of range; the message names it, its value and the remedy.
    """

    def __init__(
        self,
        *,
        compressor: str | AbstractCompressor[Any] = "sidco-e",
        ratio: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        dense_steps: int = 0,
        headroom: float = 0.2,
        value_dtype: torch.dtype = torch.float32,
        error_feedback: bool = True,
        exchange: str = "fixed",
        dense_fallback: bool = True,
        kernels: str = "auto",
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        if not isinstance(compressor, AbstractCompressor):
            compressor = make_compressor(compressor, ratio=0.001 if ratio is None else ratio)
        elif ratio is not None and ratio != compressor.ratio:
            raise ValueError(f"ratio={ratio!r} contradicts the compressor's own {compressor.ratio}; leave it out")
        self.compressor = compressor
        self.process_group = process_group
        self.dense_steps = check_count(dense_steps, "dense_steps", 0, "0 compresses from the first step on")
        self.headroom = check_number(headroom, "headroom", 0.0, "0.2 leaves room for 20 % more than k entries")
        self.value_dtype: torch.dtype = check_choice(value_dtype, "value_dtype", VALUE_DTYPES)
        self.exchange: str = check_choice(exchange, "exchange", ("fixed", "exact"))
        self.dense_fallback = check_flag(dense_fallback, "dense_fallback")
        self.feedback = ErrorFeedback(check_flag(error_feedback, "error_feedback"), check_kernels(kernels))
        self.step = 0  # synchronised backward passes begun
        self._names = None if named_parameters is None else ParameterNames(named_parameters)
        self._group: dist.ProcessGroup | None = None
        self._slots: dict[BucketLayout, Slot] = {}
        self._loaded: dict[tuple[str, ...], Any] = {}  # compressor states whose bucket did not appear yet
        self._last: list[Call] = []  # the calls of the last step
        self._step_ended = True

    @property
    def ratio(self) -> float:
        """Fraction of the entries sent."""
        return self.compressor.ratio

    def begin(self, bucket: dist.GradBucket) -> Call:  # type: ignore[name-defined]
        """Open a call of the hook: which step it belongs to, and what is remembered of buckets of this layout.

        Raises:
            TypeError: ``bucket`` is not one of DDP's.
            RuntimeError: the ranks disagree about the bucket.
        """
        started = time.perf_counter()
        if not hasattr(bucket, "buffer"):
            raise TypeError(
                f"sidco_hook needs the GradBucket of DistributedDataParallel, got {type(bucket).__name__}: it serves "
                "DDP only, neither FSDP nor the Python reducer of torch.compile"
            )
        if self._step_ended or bucket.index() == 0:  # index 0 again: the last backward was broken off
            self.step += 1
            self._last = []
        self._step_ended = bucket.is_last()
        group, names = self._bind()
        layout = names.layout(bucket.parameters(), [gradient.numel() for gradient in bucket.gradients()])
        slot = self._slots.get(layout) or self._new_slot(layout, bucket, group)
        buffer = bucket.buffer()
        dense = slot.dense or self.step <= self.dense_steps
        k = slot.layout.numel if dense else slot.k
        nbytes = buffer.numel() * buffer.element_size()
        stats = BucketStats(bucket.index(), buffer.numel(), dense, k, dense_bytes=nbytes)
        exact = self.exchange == "exact"
        call = Call(slot, self.compressor, self.feedback, group, self.step, stats, exact, started=started)
        self._last.append(call)
        return call

    def stats(self, *, residual_norm: bool = False) -> dict[str, Any]:
        """What the last step did: ``{"step": n, "buckets": [...], "total": {...}}`` (:class:`BucketStats` says what).

        Args:
            residual_norm: add each bucket's residual norm, which costs a pass over the residuals.
        """
        buckets = [asdict(call.stats) for call in self._last]
        total = summarise([call.stats for call in self._last])
        if residual_norm:
            for bucket, call in zip(buckets, self._last, strict=True):
                bucket["residual_norm"] = self.feedback.norm(call.slot.layout)
            total["residual_norm"] = math.hypot(*(bucket["residual_norm"] for bucket in buckets))
        return {"step": self.step, "buckets": buckets, "total": total}

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, of this rank: plain types and tensors, residuals by parameter name."""
        slots = self._slots.values()
        memory = [{"names": list(slot.layout.names), "state": to_plain(slot.memory)} for slot in slots]
        return {
            "format": FORMAT,
            "step": self.step,
            "compressor": repr(self.compressor),
            "residuals": self.feedback.state_dict(),
            "memory": memory + [{"names": list(names), "state": saved} for names, saved in self._loaded.items()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, in place, before or after registration and the first backward.

        Residuals find their parameters by name, whatever the bucket layout is now. Names that do not match are warned
        about. What the compressor learnt is taken over only by an equal compressor and bucket.

        Raises:
            ValueError: ``saved`` is something else.
        """
        check_format(saved)
        self.step = saved["step"]
        self._step_ended = True
        self.feedback.load_state_dict(saved["residuals"])
        same = saved["compressor"] == repr(self.compressor)
        self._loaded = {tuple(entry["names"]): entry["state"] for entry in saved["memory"]} if same else {}
        for layout, slot in self._slots.items():
            slot.memory = self._remembered(layout, self.compressor.init(layout.numel))
        if self._names is not None:
            warn_about_names(saved["residuals"], self._names.known)

    def _remembered(self, layout: BucketLayout, fresh: Any) -> Any:
        """What a checkpoint says that the compressor knew about a bucket, if it says so."""
        saved = self._loaded.pop(layout.names, None)
        return fresh if saved is None else from_plain(fresh, saved)

    def _bind(self) -> tuple[dist.ProcessGroup, ParameterNames]:
        """On the first call: the group and the parameter names, from the DDP module where they were not given."""
        if self._group is None or self._names is None:
            module = owner(self)
            if self._names is None:
                self._names = ParameterNames(reduced_parameters(module) if module else None)
                warn_about_names(self.feedback.waiting, self._names.known)
            self._group = transport.resolve(self.process_group or (module.process_group if module else None))
        return self._group, self._names

    def _new_slot(self, layout: BucketLayout, bucket: dist.GradBucket, group: dist.ProcessGroup) -> Slot:  # type: ignore[name-defined]
        """Make, and agree with the other ranks on, what is remembered of a layout that was not seen before."""
        buffer = bucket.buffer()
        below = buffer.numel() * buffer.element_size() if self.dense_fallback else sys.maxsize
        slot = Slot.make(
            layout, self.compressor, headroom=self.headroom, value_dtype=self.value_dtype, dense_below=below
        )
        options = slot.wire.checksum(slot.dense, self.exchange, self.compressor, self.dense_steps)
        agree((VERSION, layout.numel, layout.fingerprint, options, self.step), bucket.index(), group, buffer.device)
        slot.memory = self._remembered(layout, slot.memory)
        gone = [old for old in self._slots if not set(old.names).isdisjoint(layout.names)]  # DDP made new buckets
        for old in gone:
            del self._slots[old]
        self._slots[layout] = slot
        return slot
