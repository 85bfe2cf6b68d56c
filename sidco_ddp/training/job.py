"""From what was asked for to what does it: the task, the plan and the trainer."""

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import sidco_ddp
from sidco_ddp.training.checkpoints import Checkpoints, Directory, load_latest, load_path
from sidco_ddp.training.checkpoints.reader import Loaded
from sidco_ddp.training.distributed import World, from_main, together
from sidco_ddp.training.errors import OptionError
from sidco_ddp.training.interrupt import Interrupt
from sidco_ddp.training.loop import Trainer
from sidco_ddp.training.optimizers import OPTIMIZERS
from sidco_ddp.training.options import Options
from sidco_ddp.training.plan import Plan, make_plan
from sidco_ddp.training.progress import Progress
from sidco_ddp.training.record import RunRecord
from sidco_ddp.training.resume import fingerprint, restore, seed_rank, settle_buckets
from sidco_ddp.training.schedules import Schedule
from sidco_ddp.workloads import Task, make_task


def build_task(options: Options, world: World) -> Task:
    """The task with its data, on all ranks or on none.

    Raises:
        OptionError: on every rank, if the data cannot be had, or the recipe or the target makes no sense, on any.
    """

    def build() -> Task:
        return make_task(options.task, options.scale, options.settings, options.source)

    if options.download:  # by one rank of each machine, before the others look
        together(lambda: build() if world.local_rank == 0 else None, world)
    task = together(build, world)
    low, high = task.metric_range
    if options.target is not None and not low < options.target <= high:
        raise OptionError(
            f"argument --target: {options.target:g} is no {task.metric_name}; give a number above {low:g} and at most "
            f"{high:g}"
        )
    batch_size, samples = task.recipe.batch_size, task.num_train_samples
    shard = samples // world.world_size
    if batch_size > shard:
        remedy = f"give at most {shard}" if shard else f"start at most {samples} workers"
        raise OptionError(
            f"argument --batch-size: {batch_size} is more than the {shard} training samples that each of "
            f"{world.world_size} worker(s) has; {remedy}"
        )
    return task


def plan_of(options: Options, task: Task, world: World) -> Plan:
    """The plan of a task's run on this many ranks."""
    return make_plan(
        num_samples=task.num_train_samples,
        global_batch=task.recipe.batch_size * world.world_size,
        epochs=task.recipe.epochs,
        steps=options.steps,
        is_fixed="epochs" in options.settings,
        target=options.target,
    )


def describe_run(options: Options, task: Task, plan: Plan, world: World) -> dict[str, Any]:
    """What `config.json` says: everything that the numbers of the run hang on."""
    recipe = asdict(task.recipe)
    place = {
        "world_size": world.world_size,
        "device": str(world.device),
        "backend": world.backend,
        "threads": torch.get_num_threads(),
    }
    versions = {"python": platform.python_version(), "torch": torch.__version__, "sidco_ddp": sidco_ddp.__version__}
    top = {name: recipe[name] for name in ("batch_size", "lr", "optimizer")}
    task_facts = {"metric_name": task.metric_name, "higher_is_better": task.higher_is_better}
    return {
        **asdict(options),
        **top,
        **asdict(plan),
        "total_steps": plan.total_steps,
        "recipe": recipe,
        **task_facts,
        **place,
        "versions": versions,
    }


@contextmanager
def checkpoint_directory(options: Options, world: World) -> Iterator[Directory | None]:
    """The run's checkpoint folder, which no other run can have, from entry to exit; None where none is asked for.

    Raises:
        OptionError: on all ranks, if it cannot be had, or is not the same on all ranks.
    """
    if options.checkpoint_dir is None:
        yield None
        return
    directory = Directory(options.checkpoint_dir)
    try:
        word = from_main(directory.open, world)
        together(lambda: directory.check_is_shared(word), world)
    except OptionError as error:
        raise OptionError(f"argument --checkpoint-dir: {error}") from error
    try:
        yield directory
    finally:
        directory.close()


def build_trainer(
    options: Options,
    task: Task,
    plan: Plan,
    world: World,
    *,
    directory: Directory | None,
    record: RunRecord | None,
    progress: Progress,
    interrupt: Interrupt,
) -> Trainer:
    """Model, hook, optimizer and schedule, as they were in the checkpoint if there is one to go on from."""
    torch.manual_seed(options.seed)
    module = task.make_model().to(world.device)
    identity = {
        "task": options.task,
        "scale": options.scale,
        "model": fingerprint(module),
        "samples": str(task.num_train_samples),
        "compressor": options.compressor,
        "ratio": f"{options.ratio:g}",
        "optimizer": task.recipe.optimizer,
        "seed": str(options.seed),
    }
    loaded = _find_checkpoint(options, directory, identity, world)
    # Every forward copies the main rank's buffers, as is DDP's default: its running statistics are the run's.
    model = DistributedDataParallel(module, bucket_cap_mb=options.bucket_cap_mb)
    if loaded is not None:
        settle_buckets(model, task, world, options.seed)
    optimizer = OPTIMIZERS[task.recipe.optimizer](model.parameters(), task.recipe)
    seed_rank(options.seed, world)
    checkpoints = None
    if directory is not None:
        every, keep = options.checkpoint_every, options.keep
        checkpoints = Checkpoints(directory, keep=keep, identity=identity, every=every, world=world)
    trainer = Trainer(
        task=task,
        model=model,
        state=sidco_ddp.attach(model, options.compressor, ratio=options.ratio, dense_steps=options.dense_steps),
        optimizer=optimizer,
        schedule=Schedule(
            optimizer,
            task.recipe,
            steps_per_epoch=plan.steps_per_epoch,
            epochs=plan.epochs,
            lower_is_better=not (task.watched_metric and task.higher_is_better),
        ),
        plan=plan,
        ratio=options.ratio,
        ratio_warmup_epochs=options.ratio_warmup_epochs,
        seed=options.seed,
        world=world,
        record=record,
        progress=progress,
        interrupt=interrupt,
        checkpoints=checkpoints,
        check_replicas_every=options.check_replicas,
    )
    if loaded is not None:
        restore(trainer, loaded)
        if plan.max_steps is not None and trainer.totals.steps > plan.max_steps:
            raise OptionError(
                f"argument --steps: {plan.max_steps} is less than the {trainer.totals.steps} steps of {loaded.path}; "
                "give more"
            )
        progress.resume(trainer.totals.steps)
    if directory is not None and checkpoints is not None:
        if loaded is not None:
            checkpoints.resumed(trainer.totals.steps, in_place=loaded.path.parent == directory.path)
        elif options.resume is None:
            checkpoints.begin()
        else:
            checkpoints.resumed(0, in_place=False)  # those that are there cannot be read
    return trainer


def _find_checkpoint(
    options: Options, directory: Directory | None, identity: Mapping[str, str], world: World
) -> Loaded | None:
    if options.resume is None:
        return None
    if options.resume == "auto":
        assert directory is not None  # the options were checked
        return load_latest(directory, identity, world)
    return load_path(Path(options.resume), identity, world)
