"""Train a task with a sparsified gradient exchange.

    torchrun --standalone --nproc-per-node 2 train.py --compressor sidco-e --ratio 0.001
    python train.py --compressor none        # one process

The last line on stdout is a JSON summary of the run; everything else goes to stderr and to the run's folder.
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from sidco_ddp.training.console import FAILED, configure_logging, kept_stdout, refusals
from sidco_ddp.training.distributed import World, find_world, process_group
from sidco_ddp.training.interrupt import Interrupt
from sidco_ddp.training.job import build_task, build_trainer, checkpoint_directory, describe_run, plan_of
from sidco_ddp.training.listing import list_tasks
from sidco_ddp.training.options import Options, parse_arguments
from sidco_ddp.training.progress import make_progress
from sidco_ddp.training.record import run_record, to_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks; returns the exit status."""
    with Interrupt() as interrupt:
        try:
            with refusals("train.py"):
                options = parse_arguments(arguments)
                world = find_world(options.device, options.backend)
            if options.list_tasks:
                print(list_tasks() if world.is_main else "", end="\n" * world.is_main)
                return 0
            configure_logging(logging.INFO if world.is_main and not options.quiet else logging.WARNING)
            with kept_stdout() as stdout:
                with (
                    refusals("train.py"),
                    process_group(world, options.patience) as store,
                    refusals("train.py", store),
                ):
                    summary = run(options, world, interrupt)
                if world.is_main:
                    print(to_json(summary), file=stdout, flush=True)
            if not summary.get("saved", True):
                return FAILED
        except SystemExit:  # which says why itself
            raise
        except BaseException:
            # Whatever else goes wrong after a signal does so because the other ranks are leaving as well.
            if not interrupt.requested:
                raise
            return interrupt.status
    return 0


def run(options: Options, world: World, interrupt: Interrupt) -> dict[str, Any]:
    """Train inside the process group; returns the summary."""
    task = build_task(options, world)
    plan = plan_of(options, task, world)
    asked = {"task": options.task, "compressor": options.compressor, "ratio": options.ratio}
    label = f"{options.task}-{options.compressor}-{options.ratio:g}"
    with (
        checkpoint_directory(options, world) as directory,
        run_record(options.log_dir, label, describe_run(options, task, plan, world), world) as record,
        closing(make_progress(plan.total_steps)) as progress,
    ):
        trainer = build_trainer(
            options,
            task,
            plan,
            world,
            directory=directory,
            record=record,
            progress=progress,
            interrupt=interrupt,
        )
        facts = {"scale": options.scale, "seed": options.seed, "higher_is_better": task.higher_is_better}
        summary = {**asked, "world_size": world.world_size, **trainer.run(), **facts}
        if record is not None:
            record.summary(summary)
    return summary


if __name__ == "__main__":
    sys.exit(main())
