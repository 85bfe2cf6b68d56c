"""A store that holds nothing of earlier attempts.

torchrun's store outlives a restart, and so do the addresses that ranks of the attempt before have left in it: a rank
that is early reads them, and waits for peers that are dead. Nor is there a number of the attempt to tell them apart by:
``TORCHELASTIC_RESTART_COUNT`` may differ between the machines of a job (pytorch/pytorch#108158). So the ranks meet.
"""

import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from sidco_ddp.training.errors import RunError

_PATIENCE = timedelta(minutes=5)  # machines may start minutes apart
_POLL = 0.02  # seconds


def fresh_store(
    store: dist.Store,  # type: ignore[name-defined]
    rank: int,
    world_size: int,
    patience: timedelta = _PATIENCE,
) -> dist.Store:  # type: ignore[name-defined]
    """The part of `store` that the ranks of this attempt, and no others, use.

    Rank 0 names it. The others answer to the name with a word of their own, and go by it only when rank 0 has repeated
    that word: what an earlier rank 0 has left there was said to others.

    Raises:
        RunError: not all ranks came.
    """
    deadline = time.monotonic() + patience.total_seconds()
    word = uuid.uuid4().hex
    if rank == 0:
        store.set("sidco_ddp/name", word)
        answers = [f"sidco_ddp/{word}/{other}" for other in range(1, world_size)]
        _wait(lambda: store.check(answers), deadline, f"of {world_size} ranks some did not come")
        store.set(f"sidco_ddp/{word}/all", ",".join(store.get(answer).decode() for answer in answers))
        return dist.PrefixStore(f"sidco_ddp/{word}", store)  # type: ignore[attr-defined]
    found: list[str] = []

    def is_known() -> bool:
        if not store.check(["sidco_ddp/name"]):
            return False
        name = store.get("sidco_ddp/name").decode()
        store.set(f"sidco_ddp/{name}/{rank}", word)
        everyone = f"sidco_ddp/{name}/all"
        if not store.check([everyone]) or word not in store.get(everyone).decode().split(","):
            return False
        found.append(name)
        return True

    _wait(is_known, deadline, "rank 0 did not come")
    return dist.PrefixStore(f"sidco_ddp/{found[0]}", store)  # type: ignore[attr-defined]


def _wait(holds: Callable[[], bool], deadline: float, problem: str) -> None:
    while not holds():
        if time.monotonic() > deadline:
            raise RunError(f"{problem} within the time; see whether all have started, and reach MASTER_ADDR")
        time.sleep(_POLL)
