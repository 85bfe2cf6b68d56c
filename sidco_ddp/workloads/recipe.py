"""The settings of a training run as data, and how text from a command line changes them."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

SCHEDULES = ("constant", "cosine", "step", "plateau", "anneal")
OPTIMIZERS = ("sgd", "nesterov", "adamw")


class SettingError(ValueError):
    """A setting that a recipe does not have, or a value that it cannot take; the message has the remedy."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings a task trains well with. A task with settings of its own extends this.

    The learning rate climbs linearly over ``warmup_epochs`` and then follows ``schedule``: ``constant``; ``cosine``,
    along half a cosine to zero; ``step``, times ``decay`` at each fraction of the epochs in ``decay_at``; ``plateau``,
    times ``decay`` after an epoch in which the watched metric did not improve; ``anneal``, times ``decay`` an epoch.

    Raises:
        SettingError: a value is out of range.
    """

    epochs: int
    batch_size: int  # per worker
    lr: float
    optimizer: str
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup_epochs: float = 5.0
    schedule: str = "step"
    decay: float = 0.1
    decay_at: tuple[float, ...] = (0.5, 0.75)
    clip_norm: float | None = None  # of the averaged gradient; None: not clipped
    evaluate_every: int = 1  # epochs
    train_samples: int | None = None  # the first so many of the training data; None: all
    test_samples: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("evaluate_every", 1)):
            self.require(name, getattr(self, name) >= least, f"at least {least}")
        for name in ("lr", "decay"):
            self.require(name, 0 < getattr(self, name) < math.inf, "a number above 0")
        for name in ("weight_decay", "warmup_epochs"):
            self.require(name, 0 <= getattr(self, name) < math.inf, "a number of at least 0")
        for name in ("clip_norm", "train_samples", "test_samples"):
            self.require(
                name, getattr(self, name) is None or 0 < getattr(self, name) < math.inf, "none, or more than 0"
            )
        self.require("momentum", 0 <= self.momentum < 1, "a number of at least 0 and below 1")
        self.require("momentum", self.momentum > 0 or self.optimizer != "nesterov", "more than 0, as nesterov needs")
        self.require("decay_at", all(0 < at < 1 for at in self.decay_at), "fractions of the epochs, such as 0.5,0.75")
        self.require("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self.require("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")

    def require(self, name: str, holds: bool, wanted: str) -> None:
        """Raise a `SettingError` about the setting `name` unless `holds`."""
        if not holds:
            raise SettingError(f"setting {name}={getattr(self, name)!r} is refused; give {wanted}")


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def override(recipe: AnyRecipe, settings: Mapping[str, str]) -> AnyRecipe:
    """`recipe` with some settings replaced, each given as text: ``lr=0.1``, ``clip_norm=none``, ``decay_at=0.5,0.75``.

    Raises:
        SettingError: the recipe has no such setting, or the text is no value for it.
    """
    kinds = typing.get_type_hints(type(recipe))
    values = {}
    for name, text in settings.items():
        if name not in kinds:
            raise SettingError(f"setting {name!r} is unknown to this task; it has {', '.join(kinds)}")
        try:
            values[name] = _convert(text, kinds[name])
        except ValueError:
            raise SettingError(
                f"setting {name}={text!r} is refused; give {_describe(kinds[name])}, such as {getattr(recipe, name)}"
            ) from None
    return dataclasses.replace(recipe, **values)


def _convert(text: str, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):  # kind | None
        (kind,) = (choice for choice in kind.__args__ if choice is not types.NoneType)
        return None if text.lower() == "none" else _convert(text, kind)
    if typing.get_origin(kind) is tuple:
        return tuple(_convert(part, kind.__args__[0]) for part in text.split(",") if part)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"
    return kind(text)


def _describe(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join("none" if choice is types.NoneType else _describe(choice) for choice in kind.__args__)
    if typing.get_origin(kind) is tuple:
        return "numbers separated by commas"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a word")
