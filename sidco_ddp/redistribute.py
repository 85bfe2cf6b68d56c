"""The hook's states of a checkpoint for another number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def sources(rank: int, world_size: int, saved_world_size: int) -> list[int]:
    """The saved ranks whose residuals ``rank`` takes over: every ``world_size``-th; none where ranks are new."""
    return list(range(rank, saved_world_size, world_size))


def redistribute(
    states: Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, world_size: int, saved_world_size: int
) -> dict[str, Any]:
    """One rank's ``SIDCoState.state_dict()`` in a world of another size, such that the mean residual is kept.

    What a rank has not sent reaches the parameters as a share of the average, 1/W of it. So the residuals of the saved
    ranks W₀ are added up in groups, and scaled by W / W₀: (1/W) Σ (W / W₀) Σ r = (1/W₀) Σ r.

    Args:
        states: what the ranks in :func:`sources` saved; may be none.
        template: any rank's state, whose step and memory this rank takes over: these are alike on all ranks, or nearly.
        world_size: W.
        saved_world_size: W₀.
    """
    scale = world_size / saved_world_size
    residuals: dict[str, Tensor] = {}
    for state in states:
        for name, residual in state["residuals"].items():
            scaled = residual * scale
            residuals[name] = residuals[name] + scaled if name in residuals else scaled
    return {**template, "residuals": residuals}
