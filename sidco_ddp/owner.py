"""Which DDP module a hook state belongs to. DDP hands its hook the bucket, but no reference to the module."""

import gc
from collections.abc import Iterator

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def owners(state: object) -> list[DistributedDataParallel]:
    """The live DDP modules on which ``state`` is registered.

    DDP keeps every ``(hook, state)`` pair that was registered on it. Walking the garbage collector's objects costs some
    10 ms, once in a run, and finds the module also behind wrapped hooks and frameworks that register for the user.
    """
    # type() and not isinstance(): the latter asks lazy proxies for their __class__
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [module for module in modules if any(registered is state for _, registered in _pairs(module))]


def owner(state: object) -> DistributedDataParallel | None:
    """The DDP module on which ``state`` is registered; None where the hook is called by something else.

    Raises:
        RuntimeError: there are several, whose parameters one state cannot tell apart.
    """
    modules = owners(state)
    if len(modules) > 1:
        raise RuntimeError(
            f"one SIDCoState is registered on {len(modules)} DDP modules; build a state for each of them"
        )
    return modules[0] if modules else None


def reduced_parameters(module: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters that DDP reduces: those of the wrapped module that require a gradient."""
    return (pair for pair in module.module.named_parameters() if pair[1].requires_grad)


def _pairs(module: DistributedDataParallel) -> list[tuple[object, object]]:
    """The registered pairs; none on a torch that does not keep them."""
    return list(module.__dict__.get("_comm_hooks", ()))
