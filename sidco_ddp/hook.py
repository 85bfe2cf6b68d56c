"""The hook, and how to attach it.

DDP compares the hook's annotations by identity: this module must not postpone their evaluation.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sidco_ddp import transport
from sidco_ddp.compressors.base import AbstractCompressor
from sidco_ddp.owner import reduced_parameters
from sidco_ddp.state import SIDCoState


def sidco_hook(
    state: SIDCoState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    *_: object,  # what FSDP hands over besides; the state refuses such a call
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over ranks, sending only the entries that the compressor selects.

    Register it with ``ddp_model.register_comm_hook(state, sidco_hook)``. What is not sent stays in the residual of its
    parameter and is added to the next gradient. Everything collective is posted here; the callbacks only decode.
    """
    call = state.begin(bucket)
    if call.stats.dense:
        exchange = transport.all_reduce_mean(call.flush(), call.group, call.num_contributors)
        return exchange.then(call.finish_dense)

    with call.failure_told():
        target = call.compensate()
        payload = call.compress(target)
        wire = call.wire_for(payload)
        sent = call.fit(wire, payload)
        call.record(sent)
        message = call.encode(wire, sent)
    return transport.all_gather(message, call.group).then(lambda exchange: call.average(wire, exchange))


def attach(
    ddp_model: DistributedDataParallel,
    compressor: str | AbstractCompressor[Any] = "sidco-e",
    ratio: float | None = None,
    **options: Any,
) -> SIDCoState:
    """Build a state and register the hook on ``ddp_model``; the group and the parameter names are the model's own.

    Args:
        ddp_model: the model, already wrapped in ``DistributedDataParallel``.
        compressor: a name in ``COMPRESSORS``, or an instance.
        ratio: fraction of the entries sent; 0.001 unless given.
        options: further options of :class:`SIDCoState`.

    Returns:
        The state, for ``state.stats()`` and checkpoints.

    Raises:
        TypeError: ``ddp_model`` is not a ``DistributedDataParallel``, or there is no such option.
        ValueError: an option is out of range, or names another group than the model's.
        RuntimeError: the model has a communication hook already.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"attach needs a torch.nn.parallel.DistributedDataParallel model, got {type(ddp_model).__name__}; wrap the "
            "model in DDP first, after torch.distributed.init_process_group() (FSDP is not supported)"
        )
    if getattr(ddp_model, "mixed_precision", None) is not None:
        raise RuntimeError("DDP's mixed_precision=... brings a hook of its own; leave it out and use autocast instead")
    group = ddp_model.process_group
    if options.setdefault("process_group", group) not in (None, group):
        raise ValueError("process_group is not the model's own; leave it out, and give it to DistributedDataParallel")
    options["process_group"] = None  # the model's own, also after it is given another one
    options.setdefault("named_parameters", reduced_parameters(ddp_model))
    state = SIDCoState(compressor=compressor, ratio=ratio, **options)
    state.belongs_to(ddp_model)
    try:
        ddp_model.register_comm_hook(state, sidco_hook)
    except RuntimeError as error:
        raise RuntimeError(
            "this DDP model has a communication hook already, and DDP takes only one; load a checkpoint into the "
            "state that is registered (state.load_state_dict), or wrap the model in a new DistributedDataParallel"
        ) from error
    return state
