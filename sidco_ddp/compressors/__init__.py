"""The registry of compressors: one scheme a file, one name a scheme or variant."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from sidco_ddp.compressors.base import AbstractCompressor
from sidco_ddp.compressors.dgc import DgcCompressor
from sidco_ddp.compressors.gaussiank import GaussianKCompressor
from sidco_ddp.compressors.none import NoneCompressor
from sidco_ddp.compressors.randomk import RandomKCompressor
from sidco_ddp.compressors.redsync import RedSyncCompressor
from sidco_ddp.compressors.sidco import SidcoCompressor
from sidco_ddp.compressors.topk import TopKCompressor

COMPRESSORS: dict[str, Callable[..., AbstractCompressor[Any]]] = {
    "none": NoneCompressor,
    "topk": TopKCompressor,
    "randomk": RandomKCompressor,
    "dgc": DgcCompressor,
    "redsync": RedSyncCompressor,
    "gaussiank": GaussianKCompressor,
    "sidco-e": partial(SidcoCompressor, fits="exponential"),
    "sidco-p": partial(SidcoCompressor, fits="pareto"),
    "sidco-gp": partial(SidcoCompressor, fits="gamma-pareto"),
}


def make_compressor(name: str, **options: Any) -> AbstractCompressor[Any]:
    """The compressor registered under ``name``, with ``options`` (``ratio=0.001``, and the scheme's own).

    Raises:
        ValueError: no such name, no such option, or a bad value; the message lists what there is.
    """
    factory = COMPRESSORS.get(name) if isinstance(name, str) else None
    if factory is None:
        raise ValueError(f"compressor must be one of {', '.join(COMPRESSORS)}; got {name!r}")
    try:
        return factory(**options)
    except TypeError:
        scheme = factory.func if isinstance(factory, partial) else factory
        known = [field.name for field in fields(scheme) if field.name != "fits"]  # type: ignore[arg-type]
        unknown = [option for option in options if option not in known]
        if not unknown:
            raise
        raise ValueError(f"compressor {name!r} has no option {unknown[0]!r}; it has {', '.join(known)}") from None
