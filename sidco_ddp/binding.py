"""To whom a state belongs: the DDP module, the group to average over, and the names of the parameters."""

import warnings
from dataclasses import dataclass, field

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
    reduced: set[int] = field(default_factory=set)  # ids of the parameters that came in buckets
    _warned: set[str] = field(default_factory=set)

    def layout_of(self, parameters: list[Tensor]) -> BucketLayout:
        """The layout of a bucket; complex parameters count twice, by real and imaginary part."""
        self.reduced.update(map(id, parameters))
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

    @property
    def is_stale(self) -> bool:
        """Whether the module averages over another group by now."""
        return self.owner.process_group not in (None, self.group)

    def warn_about_unreduced(self) -> None:
        """Name, once, the parameters that require a gradient by now and came in no bucket of a whole step."""
        names = set(self.owner.unreduced(self.reduced)) - self._warned
        if names:
            self._warned.update(names)
            warnings.warn(
                "DDP does not average parameters that were frozen when the model was wrapped, and these require a "
                f"gradient by now: {sorted(names)}. The ranks drift apart in them; wrap the model again after thawing",
                stacklevel=2,
            )

    def num_contributors(self, gradient: Tensor) -> int:
        """How many ranks the sum is divided among: all, or those that still have data where ``join`` says so."""
        if not self.owner.divides_by_active_ranks:
            return self.group.size()
        rows = transport.all_gather_now([int(self.owner.is_active)], self.group, gradient.device)
        return max(1, sum(active for (active,) in rows))


def bind(
    owner: Owner, process_group: dist.ProcessGroup | None, names: ParameterNames | None, *, is_copy: bool, by_ddp: bool
) -> Binding:
    """Take what was not given from the DDP module on which the state is registered.

    Raises:
        RuntimeError: DDP calls and its module cannot be found, there is no group, or the state is a copy and lost it.
        ValueError: ``process_group`` is not the module's.
    """
    if by_ddp and owner.module is None:
        raise RuntimeError(
            "the DistributedDataParallel module of this SIDCoState was not found (gc.freeze() hides it), so its "
            "process group is unknown; register the hook with sidco_ddp.attach(ddp_model, ...)"
        )
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
