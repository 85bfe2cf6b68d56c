"""How the stage count M adapts to what it measured."""

import math
from typing import NamedTuple

FORGET_AFTER = 20  # periods for which a measured stage count is believed: distributions drift during training


class StageCount(NamedTuple):
    """The stage count of one bucket and the evidence for it."""

    current: int = 1
    calls: int = 0  # since the last period ended
    total: float = 0.0  # sum of raw k̂/k over those calls
    errors: tuple[float, ...] = ()  # |ln(mean raw k̂/k)| last measured with M = 1, 2, ...; -1 where unknown
    ages: tuple[int, ...] = ()  # periods since that measurement


def adapt_by_paper(stages: StageCount, tolerance: float, most: int) -> StageCount:
    """Algorithm 1, Adapt_Stages: one stage fewer when too many were selected, one more when too few.

    The mean runs over all Q calls of the period (the paper's listing adds up Q - 1 of them and divides by Q).
    On heavy tails it is stuck at one stage that selects too many; it stands here for reproduction.
    """
    mean = stages.total / stages.calls
    step = -1 if mean > 1.0 + tolerance else 1 if mean < 1.0 - tolerance else 0
    return StageCount(min(max(stages.current + step, 1), most))


def adapt_by_record(stages: StageCount, tolerance: float, most: int) -> StageCount:
    """Move towards the stage count whose raw count is nearest to k, in the direction that was seen to help.

    The error of every M tried is remembered for a while. Within the tolerance M stays. Otherwise a neighbour that was
    never tried, or not for long, is tried, the higher one first; if both were, the better one wins, if it is better.
    """
    mean = stages.total / stages.calls
    errors = list(stages.errors or (-1.0,) * most)
    ages = [min(age + 1, FORGET_AFTER) for age in stages.ages or (FORGET_AFTER,) * most]
    errors = [-1.0 if age >= FORGET_AFTER else error for error, age in zip(errors, ages, strict=True)]
    here = min(stages.current, most) - 1
    errors[here], ages[here] = abs(math.log(max(mean, 1e-9))), 0
    if 1.0 - tolerance <= mean <= 1.0 + tolerance:
        best = here
    else:
        neighbours = [place for place in (here + 1, here - 1) if 0 <= place < most]
        untried = [place for place in neighbours if errors[place] < 0.0]
        best = untried[0] if untried else min([here, *neighbours], key=errors.__getitem__)
    return StageCount(best + 1, errors=tuple(errors), ages=tuple(ages))
