"""Do all ranks mean the same bucket? Where not, every rank says so, with what each of them had."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from sidco_ddp import transport
from sidco_ddp.wire import Header

TERMS = ("wire version", "elements of the bucket", "layout checksum", "message and option checksum", "step")
HEADER_TERMS = (*TERMS[:3], "draw of the shared indices", TERMS[4])


class PeerError(RuntimeError):
    """Another rank raised an error; every rank knows, so nobody need be told."""


def agree(terms: Sequence[int], bucket: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare ``terms`` (in the order of :data:`TERMS`) over all ranks, before the first exchange of a new layout.

    Messages of different sizes make Gloo abort the process and let NCCL hang or return junk, so the sizes are
    compared once, in a collective whose own size never differs.

    Raises:
        RuntimeError: on every rank, if any of them differs.
    """
    if group.size() > 1:
        _compare(TERMS, transport.all_gather_now(list(terms), group, device), bucket)


def check_headers(headers: Sequence[Header], bucket: int) -> None:
    """Compare what arrived with every message.

    Raises:
        RuntimeError: on every rank, if any of them differs.
    """
    # the options travel once, in agree(): they cannot change under a layout
    rows = [[header.version, header.numel, header.fingerprint, header.draw, header.step] for header in headers]
    _compare(HEADER_TERMS, rows, bucket)


def check_failures(failed: Sequence[bool], bucket: int, step: int) -> None:
    """Give up where a rank could not make its message.

    Raises:
        PeerError: on every other rank, while the failed one raises its own error.
    """
    if any(failed):
        ranks = ", ".join(str(rank) for rank, bad in enumerate(failed) if bad)
        raise PeerError(f"rank {ranks} failed in bucket {bucket}, step {step}; its own error says why")


def _compare(names: Sequence[str], rows: Sequence[Sequence[int]], bucket: int) -> None:
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if len(set(values)) > 1:
            had = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise RuntimeError(
                f"the ranks disagree on the {name} in bucket {bucket}: {had}; every rank must wrap the same model "
                "with the same DDP and SIDCoState options and run the same synchronised backward passes"
            )
