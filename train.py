"""Train a task with a sparsified gradient exchange.

    torchrun --standalone --nproc-per-node 2 train.py --compressor sidco-e --ratio 0.001
    python train.py --compressor none        # one process

The last line on stdout is a JSON summary of the run; everything else goes to stderr and to the run's folder.
"""

import logging
import platform
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import sidco_ddp
from sidco_ddp.training.console import configure_logging, refusals, take_stdout
from sidco_ddp.training.distributed import World, find_world, process_group
from sidco_ddp.training.interrupt import STATUS, Interrupt
from sidco_ddp.training.loop import Trainer, make_plan
from sidco_ddp.training.optimizers import OPTIMIZERS, warmup_then_cosine
from sidco_ddp.training.options import Options, parse_arguments, settle
from sidco_ddp.training.progress import make_progress
from sidco_ddp.training.record import run_record, to_json
from sidco_ddp.workloads import Task, make_task


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks; returns the exit status."""
    with Interrupt() as interrupt:
        try:
            with refusals("train.py"):
                given = parse_arguments(arguments)
                world = find_world(given.device, given.backend)
                task = make_task(given.task)
                options = settle(given, task, world.world_size)
            stdout = take_stdout()
            configure_logging(logging.INFO if world.is_main and not options.quiet else logging.WARNING)
            with process_group(world), refusals("train.py"):
                summary = run(options, task, world, interrupt)
            if world.is_main:
                print(to_json(summary), file=stdout, flush=True)
        except BaseException:
            # Whatever else goes wrong after Ctrl-C does so because the other ranks are leaving as well.
            if not interrupt.requested:
                raise
            return STATUS
    return 0


def run(options: Options, task: Task, world: World, interrupt: Interrupt) -> dict[str, Any]:
    """Train inside the process group; returns the summary."""
    plan = make_plan(
        num_samples=task.num_train_samples,
        global_batch=options.batch_size * world.world_size,
        epochs=options.epochs,
        steps=options.steps,
        default_epochs=task.recipe.epochs,
    )
    asked = {"task": options.task, "compressor": options.compressor, "ratio": options.ratio}
    label = f"{options.task}-{options.compressor}-{options.ratio:g}"
    place = {"world_size": world.world_size, "device": str(world.device), "backend": world.backend}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "sidco_ddp": sidco_ddp.__version__}
    config = {**asdict(options), **asdict(plan), "recipe": asdict(task.recipe), **place, "versions": versions}
    with run_record(options.log_dir, label, config, world) as record:
        torch.manual_seed(options.seed)
        # Every forward copies the main rank's buffers, as is DDP's default: its running statistics are the run's.
        model = DistributedDataParallel(task.make_model().to(world.device), bucket_cap_mb=options.bucket_cap_mb)
        optimizer = OPTIMIZERS[options.optimizer](model.parameters(), options.lr, task.recipe)
        warmup_steps = round(task.recipe.warmup_epochs * plan.steps_per_epoch)
        with closing(make_progress(plan.total_steps)) as progress:
            trainer = Trainer(
                task=task,
                model=model,
                state=sidco_ddp.attach(model, options.compressor, ratio=options.ratio, dense_steps=options.dense_steps),
                optimizer=optimizer,
                schedule=warmup_then_cosine(
                    optimizer, warmup_steps=warmup_steps, total_steps=plan.epochs * plan.steps_per_epoch
                ),
                plan=plan,
                batch_size=options.batch_size,
                seed=options.seed,
                world=world,
                record=record,
                progress=progress,
                interrupt=interrupt,
            )
            summary = {**asked, "world_size": world.world_size, **trainer.run()}
        if record is not None:
            record.summary(summary)
    return summary


if __name__ == "__main__":
    sys.exit(main())
