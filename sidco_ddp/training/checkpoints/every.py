"""How often to save."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Every:
    """Every so many steps, or seconds."""

    steps: int | None = None
    seconds: float | None = None
