"""What one step cost and selected, per bucket and in total."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class BucketStats:
    """One bucket in one step.

    Attributes:
        bucket: its number in the order of the exchange.
        elements: its length.
        dense: it went out whole, by all-reduce; then k and sent_khat are its length.
        k: target count.
        raw_khat: entries that the estimate selected before it was corrected.
        sent_khat: entries that travelled.
        stages: fits behind the estimate.
        rounds: stages and corrections together.
        touched: elements read by the estimate, over all rounds.
        finite: whether every rank's target was; where not, the bucket came back as NaN and nothing was remembered.
        warm: the last call's threshold led to this one's, so that the bucket was read once.
        threshold: the magnitude above which entries were selected.
        bytes_sent: what this rank handed to the collective.
        dense_bytes: what it would have handed to an all-reduce of the bucket.
        compress_seconds: host time from the hook's start until the message was posted.
        exchange_seconds: host time from then until the bucket was decoded.
    """

    bucket: int
    elements: int
    dense: bool
    k: int
    dense_bytes: int
    raw_khat: int = 0
    sent_khat: int = 0
    stages: int = 0
    rounds: int = 0
    touched: int = 0
    finite: bool = True
    threshold: float = 0.0
    warm: bool = False
    bytes_sent: int = 0
    compress_seconds: float = 0.0
    exchange_seconds: float = 0.0


SUMMED = (
    "elements",
    "k",
    "raw_khat",
    "sent_khat",
    "touched",
    "bytes_sent",
    "dense_bytes",
    "compress_seconds",
    "exchange_seconds",
)


def summarise(buckets: Sequence[BucketStats]) -> dict[str, Any]:
    """Sums over the buckets of one step; ``stages`` is the largest, ``compressed`` says whether any went out sparse.

    ``rounds`` is the largest too, and ``warm`` says whether all that went out sparse took the warm path.
    """
    total: dict[str, Any] = {name: sum(getattr(bucket, name) for bucket in buckets) for name in SUMMED}
    total["stages"] = max((bucket.stages for bucket in buckets), default=0)
    total["rounds"] = max((bucket.rounds for bucket in buckets), default=0)
    total["compressed"] = any(not bucket.dense for bucket in buckets)
    total["dense"] = not total["compressed"]
    total["finite"] = all(bucket.finite for bucket in buckets)
    total["warm"] = total["compressed"] and all(bucket.warm or bucket.dense for bucket in buckets)
    return total


def describe(step: int, buckets: Sequence[BucketStats], norms: Sequence[float] | None) -> dict[str, Any]:
    """``SIDCoState.stats()``: one step as plain types, with each bucket's residual norm where ``norms`` are given."""
    parts = [asdict(bucket) for bucket in buckets]
    total = summarise(buckets)
    if norms is not None:
        for part, norm in zip(parts, norms, strict=True):
            part["residual_norm"] = norm
        total["residual_norm"] = math.hypot(*norms)
    return {"step": step, "buckets": parts, "total": total}
