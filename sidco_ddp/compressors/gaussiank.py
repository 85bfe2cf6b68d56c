"""GaussianK-SGD's selection: the quantile of a fitted normal distribution, and a few corrections by fixed factors."""

from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from sidco_ddp.compressors.base import AbstractCompressor, Report, Stateless, keep_nonzeros
from sidco_ddp.compressors.passes import count_above, signed_spread
from sidco_ddp.options import check_count
from sidco_ddp.payload import SparsePayload, select_above

TOO_FEW, LOWER = 2 / 3, 0.5  # below this share of k, the threshold is multiplied by this
TOO_MANY, RAISE = 4 / 3, 1.5


@dataclass(frozen=True, kw_only=True)
class GaussianKCompressor(AbstractCompressor[Stateless]):
    """Gaussian-k (Shi et al., 2019, "Understanding Top-k Sparsification in Distributed Deep Learning", Algorithm 1).

    The first threshold is ``|mean| + deviation * z``, where a standard normal is beyond ±z with probability ``ratio``.
    While fewer than 2/3 k or more than 4/3 k magnitudes are above it, it is multiplied by 0.5 or by 1.5, up to 3 times.

    Attributes:
        corrections: how often the threshold is corrected at most.
    """

    corrections: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.corrections, "corrections", 0, "3 is the paper's")

    @property
    def holds_count(self) -> bool:
        """The corrections end where they end."""
        return False

    def init(self, numel: int) -> Stateless:
        """No state."""
        return Stateless()

    def compress(self, vector: Tensor, state: Stateless) -> tuple[SparsePayload, Stateless]:
        """The entries of ``vector`` above the threshold, after the corrections."""
        numel = vector.numel()
        k = self.target_count(numel)
        if k == numel:
            payload, report = keep_nonzeros(vector)
            return payload, Stateless(report)
        threshold = self.first_threshold(vector)
        raw_count = None
        rounds = 1
        for _ in range(self.corrections):
            count = count_above(vector, threshold)
            raw_count = count if raw_count is None else raw_count
            rounds += 1
            if count < TOO_FEW * k:
                threshold *= LOWER
            elif count > TOO_MANY * k:
                threshold *= RAISE
            else:
                break
        payload = select_above(vector, threshold)
        raw_count = payload.count if raw_count is None else raw_count
        return payload, Stateless(Report(raw_count, 1, rounds + 1, (rounds + 1) * numel, threshold))

    def first_threshold(self, vector: Tensor) -> float:
        """The normal quantile. The mean's sign is dropped: a gradient and its negative lose the same entries."""
        mean, deviation = signed_spread(vector)
        return abs(mean) - deviation * NormalDist().inv_cdf(self.ratio / 2)
