"""What the hook remembers between calls: options, residuals, compressor states, the step, and their checkpoint."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sidco_ddp.binding import Binding, bind
from sidco_ddp.call import Call
from sidco_ddp.checkpoint import FORMAT, check_format, warn_about_names
from sidco_ddp.compressors import make_compressor
from sidco_ddp.compressors.base import AbstractCompressor
from sidco_ddp.feedback import ErrorFeedback
from sidco_ddp.kernels import check_kernels
from sidco_ddp.layout import ParameterNames
from sidco_ddp.options import check_choice, check_count, check_flag, check_method, check_number
from sidco_ddp.owner import Owner
from sidco_ddp.slots import Slots, nbytes
from sidco_ddp.stats import BucketStats, describe
from sidco_ddp.steps import Steps

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
        exchange: ``"fixed"`` sends messages of fixed size in one all_gather; of a selection that is too large for one
            the largest entries are sent. ``"exact"`` gathers the counts first and then messages of the largest count.
            None takes ``"fixed"`` for compressors that hold their count and ``"exact"`` for the others.
        dense_fallback: send a bucket whole when its message would not be smaller than the bucket.
        grad_scaler: the ``GradScaler`` in use, or anything with a ``get_scale()``. Residuals are then kept unscaled,
            and a step that it skips, since a bucket was not finite, leaves no trace. It takes a second buffer a bucket.
        kernels: what compensates and looks for exceedances: ``"torch"``, ``"numba"`` (CPU) or ``"triton"`` (CUDA);
            ``"auto"`` is numba on a CPU where it is installed, else torch.
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
        exchange: str | None = None,
        dense_fallback: bool = True,
        grad_scaler: Any = None,
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
        if exchange is None:
            exchange = "fixed" if compressor.holds_count else "exact"
        self.exchange: str = check_choice(exchange, "exchange", ("fixed", "exact"))
        self.dense_fallback = check_flag(dense_fallback, "dense_fallback")
        self.kernels = check_kernels(kernels)
        self._steps = Steps(check_method(grad_scaler, "grad_scaler", "get_scale", "pass a torch.amp.GradScaler"))
        spare = grad_scaler is not None
        self.feedback = ErrorFeedback(check_flag(error_feedback, "error_feedback"), kernels, spare=spare)
        self._slots = Slots(compressor, self.headroom, self.value_dtype, self.dense_fallback)
        self._names = None if named_parameters is None else ParameterNames(named_parameters)
        self._binding: Binding | None = None
        self._module: DistributedDataParallel | None = None  # until the first call
        self._is_copy = False

    @property
    def ratio(self) -> float:
        """Fraction of the entries sent. Set between two steps, and alike on all ranks, it holds from the next step on.

        Residuals stay; what the compressor learnt was about the old ratio, and is forgotten.
        """
        return self.compressor.ratio

    @ratio.setter
    def ratio(self, value: float) -> None:
        compressor = replace(self.compressor, ratio=value)
        if compressor != self.compressor:
            self._steps.settle()
            self.compressor = compressor
            self._slots = Slots(compressor, self.headroom, self.value_dtype, self.dense_fallback)

    @property
    def step(self) -> int:
        """Synchronised backward passes begun."""
        return self._steps.count

    def belongs_to(self, ddp_model: DistributedDataParallel) -> None:
        """Say on which module the hook is being registered; otherwise the first call finds it out."""
        self._module = ddp_model

    def begin(self, bucket: dist.GradBucket) -> Call:  # type: ignore[name-defined]
        """Open a call of the hook: which step it belongs to, and what is remembered of buckets of this layout.

        Raises:
            TypeError: ``bucket`` is not one of DDP's.
            RuntimeError: the ranks disagree about the bucket.
        """
        if not hasattr(bucket, "buffer"):
            raise TypeError(
                f"sidco_hook needs the GradBucket of DistributedDataParallel, got {type(bucket).__name__}: it serves "
                "DDP only, neither FSDP nor the Python reducer of torch.compile"
            )
        started = time.perf_counter()
        if self._binding and self._binding.is_stale:
            self._steps.settle()
            self._slots.restart()
            self._binding = None
        binding = self._binding or self._bind(by_ddp=isinstance(bucket, dist.GradBucket))  # type: ignore[attr-defined]
        buffer = bucket.buffer().detach()
        gradient = torch.view_as_real(buffer).flatten() if buffer.is_complex() else buffer
        layout = binding.layout_of(bucket.parameters())
        if self._steps.starts_with(layout):
            if self._steps.is_whole:
                binding.warn_about_unreduced()
            self._steps.start()
        number = len(self._steps.calls)
        slot = self._slots.get(layout)
        if slot is None:
            terms = (self.exchange, self.dense_steps, self._steps.grad_scaler is None)
            slot = self._slots.add(layout, number, gradient, self.step, binding.group, terms)
        dense = slot.dense or self.step <= self.dense_steps
        k = layout.numel if dense else slot.k
        call = Call(
            slot=slot,
            compressor=self.compressor,
            feedback=self.feedback,
            group=binding.group,
            step=self.step,
            stats=BucketStats(number, layout.numel, dense, k, dense_bytes=nbytes(gradient)),
            buffer=buffer,
            gradient=gradient,
            idle=binding.idle(layout, gradient),
            loss_scale=self._steps.loss_scale,
            num_contributors=binding.num_contributors(gradient),
            exact=self.exchange == "exact",
            guarded=self._steps.grad_scaler is not None,
            started=started,
        )
        self._steps.add(call, is_last=bucket.is_last(), num_parameters=len(binding.names.known))
        return call

    def stats(self, *, residual_norm: bool = False) -> dict[str, Any]:
        """What the last step did: ``{"step": n, "buckets": [...], "total": {...}}`` (:class:`BucketStats` says what).

        Args:
            residual_norm: add each bucket's residual norm, which costs a pass over the residuals.
        """
        if residual_norm:
            self._steps.settle()
        calls = self._steps.calls
        norms = [self.feedback.norm(call.slot.layout) for call in calls] if residual_norm else None
        return describe(self.step, [call.stats for call in calls], norms)

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, of this rank: plain types and tensors, residuals by parameter name."""
        self._steps.settle()
        return {
            "format": FORMAT,
            "step": self.step,
            "compressor": repr(self.compressor),
            "residuals": self.feedback.state_dict(),
            "memory": self._slots.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, in place, before or after registration and the first backward.

        Residuals find their parameters by name, whatever the bucket layout is now. Names that do not match are warned
        about. What the compressor learnt is taken over only by an equal compressor and bucket.

        Raises:
            ValueError: ``saved`` is something else.
        """
        check_format(saved)
        self._steps.resume(saved["step"])
        self.feedback.load_state_dict(saved["residuals"])
        self._slots.load_state_dict(saved["memory"] if saved["compressor"] == repr(self.compressor) else [])
        names = self._binding.names if self._binding else self._names
        if names is not None:
            warn_about_names(saved["residuals"], names.known)

    def __getstate__(self) -> dict[str, Any]:
        """Options and memory; a process group, a scaler and parameter objects stay behind."""
        options = {name: getattr(self, name) for name in _COPIED}
        return {"options": options, "error_feedback": self.feedback.enabled, "memory": self.state_dict()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(**saved["options"], error_feedback=saved["error_feedback"])  # type: ignore[misc]
        self.load_state_dict(saved["memory"])
        self._is_copy = True

    def _bind(self, *, by_ddp: bool) -> Binding:
        """On the first call: find the DDP module, the group and the names."""
        owner, self._module = Owner(self, self._module), None
        self._binding = bind(owner, self.process_group, self._names, is_copy=self._is_copy, by_ddp=by_ddp)
        if self.feedback.waiting:
            warn_about_names(self.feedback.waiting, self._binding.names.known)
        return self._binding


_COPIED = ("compressor", "dense_steps", "headroom", "value_dtype", "exchange", "dense_fallback", "kernels")
