"""RedSync's selection: search the threshold between the mean and the maximum of the magnitudes."""

from dataclasses import dataclass

from torch import Tensor

from sidco_ddp.compressors.base import AbstractCompressor, Report, Stateless, keep_nonzeros
from sidco_ddp.compressors.passes import count_above, magnitude_scale
from sidco_ddp.options import check_ratio
from sidco_ddp.payload import SparsePayload, select_above


@dataclass(frozen=True, kw_only=True)
class RedSyncCompressor(AbstractCompressor[Stateless]):
    """Threshold binary search (Fang et al., 2019, "RedSync", JPDC 133: "top-k with threshold binary search selection").

    The threshold is ``mean + r (maximum - mean)`` of the magnitudes. The search halves an interval of r that starts as
    [0, 1]: it stops at a count in [k, 2 k], takes the lower half below k / 2, else the upper half (also for counts
    between k / 2 and k, as published), and gives up when the interval is no wider than ``width``. The last
    threshold tried is used, whatever it selects.

    Attributes:
        width: of the interval of r at which the search ends. 0.2, three tries, is that of the implementations against
            which SIDCo was compared; a heavy tail needs a much smaller one to be searched to its end.
    """

    width: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "width", check_ratio(self.width, "width"))

    @property
    def holds_count(self) -> bool:
        """The search accepts 2 k, and may end without a count that it accepts."""
        return False

    def init(self, numel: int) -> Stateless:
        """No state."""
        return Stateless()

    def compress(self, vector: Tensor, state: Stateless) -> tuple[SparsePayload, Stateless]:
        """The entries of ``vector`` above the last threshold of the search."""
        numel = vector.numel()
        k = self.target_count(numel)
        if k == numel:
            payload, report = keep_nonzeros(vector)
            return payload, Stateless(report)
        mean, maximum = magnitude_scale(vector)
        low, high = 0.0, 1.0
        threshold, tries = mean, 0
        while high - low > self.width:
            middle = (low + high) / 2
            threshold = mean + middle * (maximum - mean)
            tries += 1
            count = count_above(vector, threshold)
            if k <= count <= 2 * k:
                break
            if 2 * count < k:
                high = middle
            else:
                low = middle
        payload = select_above(vector, threshold)
        report = Report(payload.count, stages=1, rounds=tries + 2, touched=(tries + 2) * numel, threshold=threshold)
        return payload, Stateless(report)
