"""The contract that every compressor keeps: hyper-parameters only, with its state handed in and handed back."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from sidco_ddp.options import check_ratio
from sidco_ddp.payload import SparsePayload, empty, select_above
from sidco_ddp.target import Target


class Report(NamedTuple):
    """What the last call did, for the statistics."""

    raw_count: int = 0  # entries selected before any correction
    stages: int = 0  # fits behind raw_count
    rounds: int = 0  # passes over some of the data, corrections included
    touched: int = 0  # elements read over all rounds
    threshold: float = 0.0  # every entry above it was selected
    warm: bool = False  # the last call's threshold was the first stage, and the vector was read once


def keep_nonzeros(vector: Tensor) -> tuple[SparsePayload, Report]:
    """All non-zeros of ``vector``, for schemes of which every entry is wanted: no threshold has to be found."""
    payload = select_above(vector, 0.0)
    return payload, Report(payload.count, rounds=1, touched=vector.numel())


class Stateless(NamedTuple):
    """State of a compressor that carries nothing from call to call."""

    report: Report = Report()


State = TypeVar("State", bound=Any)  # a NamedTuple of plain numbers, tuples of them, or tensors, with a `report` field


@dataclass(frozen=True, kw_only=True)
class AbstractCompressor(ABC, Generic[State]):
    """Selects about ``ratio`` of a vector's entries.

    Attributes:
        ratio: fraction kept, in (0, 1].

    A compressor knows nothing of residuals, ranks and messages. It must not write to the vector. For any
    finite vector, also zeros, constants and a single element, it returns finite values at unique, ascending indices.
    """

    ratio: float = 0.001

    sparse: ClassVar[bool] = True  # False: everything is sent, by a plain all-reduce and without a residual
    shares_indices: ClassVar[bool] = False  # True: every rank selects the same k indices, which do not travel

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio))

    @property
    def holds_count(self) -> bool:
        """Whether the count stays near k; where it does not, ``exchange="exact"`` keeps what was selected whole."""
        return True

    def target_count(self, numel: int) -> int:
        """Target count k of a vector of ``numel`` elements: ``max(1, round(ratio * numel))``."""
        return max(1, round(self.ratio * numel))

    @abstractmethod
    def init(self, numel: int) -> State:
        """State before the first call on vectors of ``numel`` elements."""

    @abstractmethod
    def compress(self, vector: Tensor, state: State) -> tuple[SparsePayload, State]:
        """Select from ``vector`` (1-D, float32, finite); returns the selection and the state for the next call."""

    def shared_draw(self, state: State) -> int:
        """Where indices are shared: a number that the next call's indices hang on, compared over the ranks."""
        return 0

    def select(self, target: Target, state: State) -> tuple[SparsePayload, State]:
        """:meth:`compress` of a target that may not be added up yet; selects nothing from one that is not finite.

        A scheme that needs only what exceeds a threshold overrides this, and gets it from the pass that adds.
        """
        if not target.finite:
            return empty(target.dense()), state
        return self.compress(target.dense(), state)
