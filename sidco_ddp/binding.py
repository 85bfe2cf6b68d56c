"""To whom a state belongs: the DDP module, the group to average over, and the names of the parameters."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sidco_ddp import transport
from sidco_ddp.layout import BucketLayout, ParameterNames
from sidco_ddp.owner import Owner, reduced_parameters


@dataclass(frozen=True)
class Binding:
    """What is found out once, at a state's first call."""

    owner: Owner
    group: dist.ProcessGroup
    names: ParameterNames

    def layout_of(self, parameters: list[Tensor]) -> BucketLayout:
        """The layout of a bucket; complex parameters count twice, by real and imaginary part."""
        return self.names.layout(parameters, [p.numel() * (2 if p.is_complex() else 1) for p in parameters])

    def idle(self, layout: BucketLayout, gradient: Tensor) -> list[str]:
        """Parameters that this rank's backward did not reach, where DDP allows for such.

        They have an all-zero gradient. Were their residual sent, it would move parameters that nobody used, or be
        dropped by DDP where no rank used them; so it waits for their next gradient.
        """
        if not self.owner.may_skip_parameters or gradient.is_sparse or gradient.numel() == 0:
            return []
        reached = [(gradient[where] != 0).any() for where in layout.slices.values()]
        return [name for name, flag in zip(layout.names, _to_host(reached), strict=True) if not flag]

    def num_contributors(self, gradient: Tensor) -> int:
        """How many ranks the sum is divided among: all, or those that still have data where ``join`` says so."""
        if not self.owner.divides_by_active_ranks:
            return self.group.size()
        rows = transport.all_gather_now([int(self.owner.is_active)], self.group, gradient.device)
        return max(1, sum(active for (active,) in rows))


def bind(
    state: object, process_group: dist.ProcessGroup | None, names: ParameterNames | None, *, is_copy: bool
) -> Binding:
    """Find the DDP module on which ``state`` is registered, and take from it what was not given.

    Raises:
        RuntimeError: the state is registered on several modules, has no group, or is a copy that lost its own.
        ValueError: ``process_group`` is not the module's.
    """
    owner = Owner(state)
    if is_copy and owner.module is None and process_group is None:
        raise RuntimeError(
            "this SIDCoState is a copy, and a copy does not take the process group along; register it on a "
            "DistributedDataParallel module, or set its process_group"
        )
    if process_group is not None and owner.process_group not in (None, process_group):
        raise ValueError("process_group is not the DDP module's own; leave it out, or give the module the same group")
    if names is None:
        names = ParameterNames(reduced_parameters(owner.module) if owner.module else None)
    return Binding(owner, transport.resolve(process_group or owner.process_group), names)


def _to_host(flags: list[Tensor]) -> list[bool]:
    """All flags in one transfer."""
    return [bool(flag) for flag in torch.stack(flags).tolist()]
