"""A selection as a message of fixed size, and back (``docs/wire-format.md`` has the byte table)."""

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sidco_ddp.payload import SparsePayload, largest

VERSION = 1
HEADER_BYTES = 32
NONFINITE = 1  # flag: this rank's target holds an infinity or a NaN, its message is empty
INT32_LIMIT = 2**31 - 1  # largest numel whose indices travel as int32


class Header(NamedTuple):
    """First 32 bytes of a message: four little-endian 64-bit words (the first one is split)."""

    version: int
    flags: int
    fingerprint: int  # of the bucket's layout
    numel: int
    num_entries: int
    step: int

    def words(self) -> list[int]:
        """The header as four 64-bit integers."""
        return [self.version | self.flags << 8 | self.fingerprint << 32, self.numel, self.num_entries, self.step]

    @classmethod
    def parse(cls, words: list[int]) -> "Header":
        """Undo :meth:`words`."""
        first, numel, num_entries, step = words
        return cls(first & 0xFF, first >> 8 & 0xFF, first >> 32, numel, num_entries, step)


@dataclass(frozen=True)
class WireFormat:
    """How the selections of one bucket travel.

    Attributes:
        numel: elements of the bucket.
        capacity: entries that a message has room for; the rest of a larger selection is not sent.
        value_dtype: float32, float16 or bfloat16.
    """

    numel: int
    capacity: int
    value_dtype: torch.dtype = torch.float32

    @classmethod
    def for_count(cls, numel: int, k: int, headroom: float, value_dtype: torch.dtype) -> "WireFormat":
        """Room for ``max(k + 1, ceil((1 + headroom) k))`` entries, never for more than there are."""
        room = -int(-(1.0 + headroom) * k // 1)
        return cls(numel, min(max(k + 1, room), numel), value_dtype)

    @property
    def index_dtype(self) -> torch.dtype:
        """int32, or int64 for buckets of 2³¹ elements and more."""
        return torch.int32 if self.numel <= INT32_LIMIT else torch.int64

    @cached_property
    def indices_end(self) -> int:
        """Byte at which the indices end and the values begin."""
        return HEADER_BYTES + self.capacity * self.index_dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Size of every message, a multiple of 8 so that the rows of a gathered table stay aligned."""
        end = self.indices_end + self.capacity * self.value_dtype.itemsize
        return -(-end // 8) * 8

    def checksum(self, *terms: object) -> int:
        """31-bit checksum of the format and of further ``terms`` on which the ranks must agree."""
        return zlib.crc32(repr((self, terms)).encode()) & 0x7FFFFFFF

    def fit(self, payload: SparsePayload) -> SparsePayload:
        """What of ``payload`` is really sent: the largest that fit, as the receivers will read them.

        A value beyond the range of ``value_dtype`` becomes the largest that it can hold.
        """
        kept = largest(payload, self.capacity)
        if self.value_dtype == torch.float32:
            return kept
        limit = torch.finfo(self.value_dtype).max
        values = kept.values.clamp(-limit, limit).to(self.value_dtype).float()
        return SparsePayload(values, kept.indices, kept.numel)

    def encode(self, sent: SparsePayload, header: Header) -> Tensor:
        """The message (uint8, ``nbytes`` long) of a selection that fits. Unused slots are zero."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=sent.values.device)
        words = torch.tensor(header.words(), dtype=torch.int64)
        message[:HEADER_BYTES].view(torch.int64).copy_(words, non_blocking=True)
        indices, values = self._slots(message)
        indices[: sent.count] = sent.indices
        values[: sent.count] = sent.values
        return message

    def headers(self, gathered: Tensor) -> list[Header]:
        """The header of every rank, from the table of all messages (ranks x nbytes)."""
        words = gathered[:, :HEADER_BYTES].contiguous().view(torch.int64)
        return [Header.parse(row) for row in words.tolist()]

    def decode(self, message: Tensor, count: int) -> SparsePayload:
        """The selection of ``count`` entries in a message."""
        indices, values = self._slots(message)
        return SparsePayload(values[:count].float(), indices[:count].long(), self.numel)

    def average(self, gathered: Tensor, headers: list[Header], out: Tensor) -> None:
        """Mean of all ranks' selections into ``out``, which is overwritten.

        Ranks are added one by one in rank order, each entry scaled by one over their number once: all replicas
        compute the same bits. Sums are taken in float32 whatever the dtype of ``out``.
        """
        total = out if out.dtype == torch.float32 else torch.empty(self.numel, device=out.device)
        total.zero_()
        for message, header in zip(gathered, headers, strict=True):
            indices, values = (slot[: header.num_entries] for slot in self._slots(message))
            total.index_add_(0, indices, values.float() * (1.0 / len(headers)))
        if total is not out:
            out.copy_(total)

    def _slots(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a message's index and value slots."""
        end = self.indices_end
        values_end = end + self.capacity * self.value_dtype.itemsize
        return message[HEADER_BYTES:end].view(self.index_dtype), message[end:values_end].view(self.value_dtype)
