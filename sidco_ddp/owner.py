"""The DDP module that a hook state belongs to, and what the hook must know of it.

DDP hands its hook the bucket, but no reference to itself. It keeps every ``(hook, state)`` pair that was registered on
it, though, so the module can be found: also behind wrapped hooks, and frameworks that register for the user.
"""

import gc
import weakref
from collections.abc import Container, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def named_parameters(module: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters of the wrapped module, without those that DDP was told to ignore."""
    ignored = getattr(module, "parameters_to_ignore", ())
    for name, parameter in module.module.named_parameters():
        if name not in ignored:
            yield name, parameter


def reduced_parameters(module: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters that DDP reduces: those that require a gradient when it is built."""
    return ((name, parameter) for name, parameter in named_parameters(module) if parameter.requires_grad)


class Owner:
    """The DDP module on which a state is registered; none where something else calls the hook.

    Args:
        state: the hook's state.
        known: the module, if it is known; otherwise it is searched for.

    Raises:
        RuntimeError: there are several, whose parameters one state cannot tell apart.
    """

    def __init__(self, state: object, known: DistributedDataParallel | None = None) -> None:
        modules = _modules_of(state) if known is None else [known]
        if len(modules) > 1:
            raise RuntimeError(
                f"one SIDCoState is registered on {len(modules)} DDP modules; build a state for each of them"
            )
        self._module = weakref.ref(modules[0]) if modules else None
        self._unreduced: list[tuple[str, Tensor]] | None = None

    @property
    def module(self) -> DistributedDataParallel | None:
        """The module, as long as it lives."""
        return self._module() if self._module else None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group over which the module averages."""
        return self.module.process_group if self.module else None

    @property
    def may_skip_parameters(self) -> bool:
        """Whether a backward need not reach every parameter."""
        return self.module is not None and (self.module.find_unused_parameters or self.module.static_graph)

    @property
    def divides_by_active_ranks(self) -> bool:
        """Within ``join(divide_by_initial_world_size=False)``: ranks that ran out of data do not count."""
        module = self.module
        joining = module is not None and getattr(getattr(module, "_join_config", None), "enable", False)
        return joining and not getattr(module, "_divide_by_initial_world_size", True)

    @property
    def is_active(self) -> bool:
        """Whether this rank runs a backward itself; a rank that ran out of data only answers the others."""
        return torch._C._current_graph_task_id() != -1

    def unreduced(self, reduced: Container[int]) -> list[str]:
        """Names that require a gradient although DDP does not reduce them; ``reduced`` has the ids of those it does.

        The first call decides which parameters to watch, so that a step does not walk the whole model.
        """
        if self._unreduced is None:
            named = named_parameters(self.module) if self.module else ()
            self._unreduced = [(name, parameter) for name, parameter in named if id(parameter) not in reduced]
        return [name for name, parameter in self._unreduced if parameter.requires_grad]


def _modules_of(state: object) -> list[DistributedDataParallel]:
    # walking the collector's objects takes some 10 to 200 ms, once in a run
    # type() and not isinstance(): the latter asks lazy proxies for their __class__
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [module for module in modules if any(own is state for _, own in module.__dict__.get("_comm_hooks", ()))]
