"""The hook's memory as plain types and tensors, which load with torch's default ``weights_only``."""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor

FORMAT = 1


def to_plain(memory: Any) -> Any:
    """A compressor's state as dicts and lists; what only describes the last call is left out."""
    if isinstance(memory, tuple) and hasattr(memory, "_asdict"):
        return {name: to_plain(value) for name, value in memory._asdict().items() if name != "report"}
    if isinstance(memory, tuple):
        return list(memory)
    return memory.clone() if isinstance(memory, Tensor) else memory


def from_plain(template: Any, saved: Any) -> Any:
    """Undo :func:`to_plain`; ``template`` is a fresh state of the same compressor."""
    if isinstance(template, tuple) and hasattr(template, "_replace"):
        return template._replace(**{name: from_plain(getattr(template, name), value) for name, value in saved.items()})
    if isinstance(template, tuple):
        return tuple(saved)
    return saved.clone() if isinstance(saved, Tensor) else saved


def check_format(saved: dict[str, Any]) -> None:
    """Refuse what is not a state of this package, or is of a format that it does not know.

    Raises:
        ValueError: it is not.
    """
    expected = {"format", "step", "compressor", "residuals", "memory"}
    if not isinstance(saved, dict) or not expected <= saved.keys():
        found = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"not a SIDCoState.state_dict(): expected the entries {sorted(expected)}, got {found}")
    if saved["format"] != FORMAT:
        raise ValueError(f"the hook's state has format {saved['format']}, this version reads {FORMAT}")


def warn_about_names(saved: Iterable[str], own: Iterable[str]) -> None:
    """Name the residuals that found no parameter, and the parameters that found no residual."""
    saved, own = set(saved), set(own)
    if not saved or not own:
        return
    if surplus := sorted(saved - own):
        warnings.warn(f"residuals without a parameter in this model are kept but not used: {surplus}", stacklevel=3)
    if missing := sorted(own - saved):
        warnings.warn(f"parameters without a residual in the checkpoint start from zero: {missing}", stacklevel=3)
