"""Which parameters a bucket holds, in buffer order.

DDP re-buckets after the first backward and reverses the order of the parameters *under the same bucket index and
often the same length*. So nothing in this package is ever keyed by a bucket's index: the key is the parameter.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True)
class BucketLayout:
    """Names and sizes of the parameters in one bucket, in buffer order."""

    names: tuple[str, ...]
    numels: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Elements in the bucket."""
        return sum(self.numels)

    def overlaps(self, other: "BucketLayout") -> bool:
        """Whether the two hold a parameter in common: DDP made new buckets."""
        return not set(self.names).isdisjoint(other.names)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the bucket's buffer."""
        ends = accumulate(self.numels)
        return {name: slice(end - numel, end) for name, numel, end in zip(self.names, self.numels, ends, strict=True)}

    @cached_property
    def fingerprint(self) -> int:
        """31-bit checksum of the sizes, equal on all ranks that hold the same layout."""
        return zlib.crc32(repr(self.numels).encode()) & 0x7FFFFFFF


class ParameterNames:
    """Names of parameter objects; those that nobody named are numbered in the order in which they are met."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
        self._named = list(named_parameters or ())  # keeps the parameters alive, so that their ids stay theirs
        self._names = {id(parameter): name for name, parameter in self._named}
        self._complete = bool(self._named)

    @property
    def known(self) -> list[str]:
        """The names so far: all of them, if they were given."""
        return list(self._names.values())

    def of(self, parameter: Tensor) -> str:
        """The parameter's name.

        Raises:
            ValueError: names were given, but not for this parameter.
        """
        name = self._names.get(id(parameter))
        if name is None:
            if self._complete:
                raise ValueError(
                    f"named_parameters does not name a parameter of shape {tuple(parameter.shape)} that DDP reduces; "
                    "pass named_parameters=model.named_parameters() of the wrapped model"
                )
            name = f"parameter.{len(self._names)}"
            self._names[id(parameter)] = name
            self._named.append((name, parameter))
        return name

    def layout(self, parameters: Sequence[Tensor], numels: Sequence[int]) -> BucketLayout:
        """The layout of a bucket that holds ``parameters``, with ``numels`` buffer elements each."""
        return BucketLayout(tuple(self.of(parameter) for parameter in parameters), tuple(numels))
