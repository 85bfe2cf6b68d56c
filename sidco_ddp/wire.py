"""A selection as a message of fixed size, and back (``docs/wire-format.md`` has the byte table)."""

import math
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
FAILED = 2  # flag: this rank raised an error before it had a message
DRAW_MASK = 0xFFFF
INT32_LIMIT = 2**31 - 1  # largest numel whose indices travel as int32


class Header(NamedTuple):
    """First 32 bytes of a message: four 64-bit words in the machine's byte order."""

    version: int
    flags: int
    fingerprint: int  # of the bucket's layout
    numel: int
    num_entries: int
    step: int
    draw: int = 0  # where no index travels: what the ranks' indices hang on, 16 bits

    def words(self) -> list[int]:
        """The header as four 64-bit integers."""
        first = self.version | self.flags << 8 | self.draw << 16 | self.fingerprint << 32
        return [first, self.numel, self.num_entries, self.step]

    @classmethod
    def parse(cls, words: list[int]) -> "Header":
        """Undo :meth:`words`."""
        first, numel, num_entries, step = words
        return cls(first & 0xFF, first >> 8 & 0xFF, first >> 32, numel, num_entries, step, first >> 16 & DRAW_MASK)


@dataclass(frozen=True)
class WireFormat:
    """How the selections of one bucket travel.

    Attributes:
        numel: elements of the bucket.
        capacity: entries that a message has room for; the rest of a larger selection is not sent.
        value_dtype: float32, float16 or bfloat16.
        with_indices: False where every rank selects the same indices: each reader then uses its own.
    """

    numel: int
    capacity: int
    value_dtype: torch.dtype = torch.float32
    with_indices: bool = True

    @classmethod
    def for_count(
        cls, numel: int, k: int, headroom: float, value_dtype: torch.dtype, with_indices: bool = True
    ) -> "WireFormat":
        """Room for ``max(k + 1, ceil((1 + headroom) k))`` entries, never for more than there are.

        Shared indices are k, always: there is no rest that any rank could leave out alone.
        """
        room = max(k + 1, -int(-(1.0 + headroom) * k // 1)) if with_indices else k
        return cls(numel, min(room, numel), value_dtype, with_indices)

    @property
    def index_dtype(self) -> torch.dtype:
        """int32, or int64 for buckets of 2³¹ elements and more."""
        return torch.int32 if self.numel <= INT32_LIMIT else torch.int64

    @cached_property
    def indices_end(self) -> int:
        """Byte at which the indices end and the values begin."""
        return HEADER_BYTES + (self.capacity * self.index_dtype.itemsize if self.with_indices else 0)

    @cached_property
    def nbytes(self) -> int:
        """Size of every message, a multiple of 8 so that the rows of a gathered table stay aligned."""
        end = self.indices_end + self.capacity * self.value_dtype.itemsize
        return -(-end // 8) * 8

    def checksum(self, *terms: object) -> int:
        """31-bit checksum of the format and of further ``terms`` on which the ranks must agree."""
        return zlib.crc32(repr((self, terms)).encode()) & 0x7FFFFFFF

    def fit(self, payload: SparsePayload, limit: float = math.inf) -> SparsePayload:
        """What of ``payload`` is really sent: the largest that fit, as the receivers will read them.

        A magnitude beyond ``limit``, or beyond the range of ``value_dtype``, is cut down to it.
        """
        kept = largest(payload, self.capacity)
        limit = min(limit, torch.finfo(self.value_dtype).max)
        if limit >= torch.finfo(torch.float32).max:
            return kept
        values = kept.values.clamp(-limit, limit).to(self.value_dtype).float()
        return SparsePayload(values, kept.indices, kept.numel)

    def encode(self, sent: SparsePayload, header: Header) -> Tensor:
        """The message (uint8, ``nbytes`` long) of a selection that fits. Unused slots are zero."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=sent.values.device)
        words = torch.tensor(header.words(), dtype=torch.int64)
        message[:HEADER_BYTES].view(torch.int64).copy_(words, non_blocking=True)
        indices, values = self._slots(message)
        if self.with_indices:
            indices[: sent.count] = sent.indices
        values[: sent.count] = sent.values
        return message

    def headers(self, gathered: Tensor) -> list[Header]:
        """The header of every rank, from the table of all messages (ranks x nbytes)."""
        words = gathered[:, :HEADER_BYTES].contiguous().view(torch.int64)
        return [Header.parse(row) for row in words.tolist()]

    def decode(self, message: Tensor, count: int, shared: Tensor | None = None) -> SparsePayload:
        """The selection of ``count`` entries in a message; ``shared`` are its indices where none travel."""
        indices, values = self._slots(message)
        if not self.with_indices:
            assert shared is not None
            indices = shared
        return SparsePayload(values[:count].float(), indices[:count].long(), self.numel)

    def combine(
        self, gathered: Tensor, headers: list[Header], out: Tensor, factor: float, shared: Tensor | None = None
    ) -> None:
        """``factor`` times the sum of all ranks' selections into ``out``, which is overwritten.

        Ranks are added one by one in rank order, each entry scaled once: all replicas compute the same bits. Sums are
        taken in float32 whatever the dtype of ``out``.
        """
        total = out if out.dtype == torch.float32 else torch.empty(self.numel, device=out.device)
        total.zero_()
        for message, header in zip(gathered, headers, strict=True):
            indices, values = self._slots(message)
            if shared is not None:
                indices = shared
            count = header.num_entries
            total.index_add_(0, indices[:count], values[:count].float() * factor)
        if total is not out:
            out.copy_(total)

    def _slots(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a message's index and value slots."""
        end = self.indices_end
        values_end = end + self.capacity * self.value_dtype.itemsize
        return message[HEADER_BYTES:end].view(self.index_dtype), message[end:values_end].view(self.value_dtype)
