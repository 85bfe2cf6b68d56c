"""From the hook's statistics to numbers worth keeping: one set a step, and one for the whole run."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def compression_metrics(stats: Mapping[str, Any]) -> dict[str, Any]:
    """What `metrics.jsonl` keeps of one step's `SIDCoState.stats()`.

    k̂/k is over the buckets that were compressed: a bucket that went out whole selects nothing, and its k, all of its
    elements, would drown the others'. It is None where no bucket was compressed.
    """
    compressed = [bucket for bucket in stats["buckets"] if not bucket["dense"]]
    k = sum(bucket["k"] for bucket in compressed)
    total = stats["total"]
    return {
        "raw_khat_over_k": sum(bucket["raw_khat"] for bucket in compressed) / k if k else None,
        "khat_over_k": sum(bucket["sent_khat"] for bucket in compressed) / k if k else None,
        "stages": max((bucket["stages"] for bucket in compressed), default=None),
        "bytes_sent": total["bytes_sent"],
        "dense_bytes": total["dense_bytes"],
        "compress_seconds": total["compress_seconds"],
        "exchange_seconds": total["exchange_seconds"],
    }


@dataclass
class Totals:
    """What a run has come to so far, on one rank, and where in its data it stands."""

    steps: int = 0
    epoch: int = 0  # counted from 0, and how many of its batches are done:
    batch: int = 0
    samples: int = 0  # of all ranks
    seconds: float = 0.0  # before this process started
    epoch_loss: float = 0.0  # sum over the steps of the current epoch
    epoch_steps: int = 0
    bytes_sent: int = 0
    dense_bytes: int = 0
    step_seconds: float = 0.0
    ratios: int = 0  # compressed steps, and their k̂/k
    ratio_sum: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    outcome: dict[str, Any] = field(default_factory=dict)  # of the last evaluation, and when that was:
    evaluated_step: int = 0
    evaluated_seconds: float = 0.0

    @property
    def epochs_begun(self) -> int:
        """How many epochs have been trained, whole or in part."""
        return self.epoch + (self.batch > 0)

    def end_epoch(self) -> None:
        """Go to the start of the next one, and forget the losses of this one."""
        self.epoch += 1
        self.batch = 0
        self.epoch_loss, self.epoch_steps = 0.0, 0

    def add(self, loss: float, samples: int, seconds: float, compression: Mapping[str, Any]) -> None:
        """Count one step: its loss, its samples on all ranks, its time, and its `compression_metrics`."""
        self.steps += 1
        self.samples += samples
        self.batch += 1
        self.epoch_loss += loss
        self.epoch_steps += 1
        self.step_seconds += seconds
        self.bytes_sent += compression["bytes_sent"]
        self.dense_bytes += compression["dense_bytes"]
        ratio = compression["khat_over_k"]
        if ratio is not None:
            self.ratios += 1
            self.ratio_sum += ratio
            self.ratio_min, self.ratio_max = min(self.ratio_min, ratio), max(self.ratio_max, ratio)

    def summary(self) -> dict[str, Any]:
        """The part of the run's summary that is about compression; None where no step was compressed."""
        compressed = self.ratios > 0
        return {
            "khat_over_k_mean": self.ratio_sum / self.ratios if compressed else None,
            "khat_over_k_min": self.ratio_min if compressed else None,
            "khat_over_k_max": self.ratio_max if compressed else None,
            "bytes_sent_per_step": self.bytes_sent / max(1, self.steps),
            "dense_bytes_per_step": self.dense_bytes / max(1, self.steps),
        }

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain types."""
        return asdict(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for entry in fields(self):
            setattr(self, entry.name, saved[entry.name])
