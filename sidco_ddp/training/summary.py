"""From the hook's statistics to numbers worth keeping: one set a step, and one for the whole run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
class CompressionTotals:
    """Running totals of `compression_metrics` over the steps of a run."""

    steps: int = 0
    bytes_sent: int = 0
    dense_bytes: int = 0
    _ratios: list[float] = field(default_factory=list)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Count one step."""
        self.steps += 1
        self.bytes_sent += metrics["bytes_sent"]
        self.dense_bytes += metrics["dense_bytes"]
        if metrics["khat_over_k"] is not None:
            self._ratios.append(metrics["khat_over_k"])

    def summary(self) -> dict[str, Any]:
        """The part of the run's summary that is about compression; None where no step was compressed."""
        ratios = self._ratios
        return {
            "khat_over_k_mean": sum(ratios) / len(ratios) if ratios else None,
            "khat_over_k_min": min(ratios, default=None),
            "khat_over_k_max": max(ratios, default=None),
            "bytes_sent_per_step": self.bytes_sent / self.steps,
            "dense_bytes_per_step": self.dense_bytes / self.steps,
        }
