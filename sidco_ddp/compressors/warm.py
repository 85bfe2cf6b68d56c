"""The warm start: the last call's threshold, lowered by a margin that follows what it lets through.

Error feedback heaps magnitudes up just below the last threshold, and from call to call the right threshold moves by
some ten per cent. A fixed margin would let through anything from less than k to 27 k; one that follows keeps it near
``AIM * k``, where a fit has enough to work on and a pass over it costs nothing beside the vector.
"""

from typing import NamedTuple

from sidco_ddp.search import to_float32

AIM = 2.5  # exceedances wanted, in multiples of k
SPEED = 0.15  # exponent with which the margin follows
FLOOR, CEILING = 0.3, 0.98  # of the margin
MOST = 16  # multiples of k beyond which the exceedances are not worth collecting


class WarmStart(NamedTuple):
    """What carries the threshold of one bucket from call to call: plain numbers."""

    threshold: float = -1.0  # of the last call; negative: there was none
    margin: float = 0.9

    @property
    def known(self) -> bool:
        """Whether there was a call before."""
        return self.threshold >= 0.0

    @property
    def first_threshold(self) -> float:
        """The first threshold to try. 0 after a call that selected every non-zero."""
        return to_float32(self.threshold * self.margin)

    def follow(self, count: int, k: int) -> "WarmStart":
        """The margin after ``count`` entries exceeded the first threshold.

        A change of regime counts like a moderate miss: the threshold itself recovers at once.
        """
        share = min(max(count / (AIM * k), 0.1), MOST / AIM)
        return self._replace(margin=min(max(self.margin * share**SPEED, FLOOR), CEILING))

    def after(self, threshold: float) -> "WarmStart":
        """The state that hands ``threshold`` to the next call."""
        return self._replace(threshold=threshold)

    @staticmethod
    def limit(k: int, numel: int) -> int:
        """Most exceedances with which the warm path goes on; no vector that short has any use for it."""
        return max(4 * k, min(MOST * k, numel // 8))
