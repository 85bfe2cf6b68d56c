"""What is remembered of each bucket layout: its message format, and what the compressor learnt."""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidco_ddp.agreement import agree
from sidco_ddp.checkpoint import from_plain, to_plain
from sidco_ddp.compressors.base import AbstractCompressor
from sidco_ddp.layout import BucketLayout
from sidco_ddp.wire import VERSION, WireFormat


@dataclass
class Slot:
    """What is remembered of the buckets of one layout."""

    layout: BucketLayout
    wire: WireFormat
    k: int
    dense: bool  # goes out whole: its message would not be smaller, or nothing is to be compressed
    memory: Any  # the compressor's state
    last_memory: Any = None  # the compressor's state before the last call


@dataclass
class Slots:
    """The slots of one model, made when a layout first appears."""

    compressor: AbstractCompressor[Any]
    headroom: float
    value_dtype: torch.dtype
    dense_fallback: bool
    _slots: dict[BucketLayout, Slot] = field(default_factory=dict)
    _loaded: dict[tuple[str, ...], Any] = field(default_factory=dict)  # states whose bucket did not appear yet

    def get(self, layout: BucketLayout) -> Slot | None:
        """The slot of a layout that was seen before."""
        return self._slots.get(layout)

    def add(
        self, layout: BucketLayout, bucket: int, gradient: Tensor, step: int, group: dist.ProcessGroup, terms: object
    ) -> Slot:
        """Make the slot of a new layout and agree on it, and on further ``terms``, with the other ranks.

        Raises:
            RuntimeError: on every rank, if they do not agree.
        """
        k = self.compressor.target_count(layout.numel)
        wire = WireFormat.for_count(
            layout.numel, k, self.headroom, self.value_dtype, not self.compressor.shares_indices
        )
        limit = nbytes(gradient) if self.dense_fallback else sys.maxsize
        dense = not self.compressor.sparse or gradient.is_sparse or wire.nbytes >= limit
        checksum = wire.checksum(dense, self.compressor, terms)
        agree((VERSION, layout.numel, layout.fingerprint, checksum, step), bucket, group, gradient.device)
        for old in [old for old in self._slots if old.overlaps(layout)]:
            del self._slots[old]  # DDP made new buckets
        slot = self._slots[layout] = Slot(layout, wire, k, dense, self._remembered(layout))
        return slot

    def restart(self) -> None:
        """Agree on all layouts anew, as after a change of group; what the compressor learnt is kept."""
        saved = self.state_dict()
        self._slots.clear()
        self.load_state_dict(saved)

    def state_dict(self) -> list[dict[str, Any]]:
        """The compressor's states as plain types, each with the names of its bucket's parameters."""
        held = [(slot.layout.names, to_plain(slot.memory)) for slot in self._slots.values()]
        return [{"names": list(names), "state": saved} for names, saved in [*held, *self._loaded.items()]]

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        """Replace the compressor's states; those of buckets that did not appear yet wait for them."""
        self._loaded = {tuple(entry["names"]): entry["state"] for entry in saved}
        for slot in self._slots.values():
            slot.memory = self._remembered(slot.layout)

    def _remembered(self, layout: BucketLayout) -> Any:
        fresh = self.compressor.init(layout.numel)
        saved = self._loaded.pop(layout.names, None)
        return fresh if saved is None else from_plain(fresh, saved)


def nbytes(gradient: Tensor) -> int:
    """Bytes of a gradient's entries; of a sparse one, of its indices too."""
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.nbytes
