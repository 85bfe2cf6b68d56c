"""Which DDP module a hook state belongs to. DDP hands its hook the bucket, but no reference to the module."""

import gc

from torch.nn.parallel import DistributedDataParallel


def owners(state: object) -> list[DistributedDataParallel]:
    """The live DDP modules on which ``state`` is registered.

    DDP keeps every ``(hook, state)`` pair that was registered on it. Walking the garbage collector's objects costs some
    10 ms, once in a run, and finds the module also behind wrapped hooks and frameworks that register for the user.
    """
    # type() and not isinstance(): the latter asks lazy proxies for their __class__
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [module for module in modules if any(registered is state for _, registered in _pairs(module))]


def _pairs(module: DistributedDataParallel) -> list[tuple[object, object]]:
    """The registered pairs; none on a torch that does not keep them."""
    return list(module.__dict__.get("_comm_hooks", ()))
