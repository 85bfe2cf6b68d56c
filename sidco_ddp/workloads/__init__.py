"""Models, data and recipes to train: one task a file, every task in `TASKS`."""

from collections.abc import Mapping

from sidco_ddp.workloads.an4_lstm import An4Lstm
from sidco_ddp.workloads.base import Batch, DataError, DataSource, Shard, Task, global_order, local_batches
from sidco_ddp.workloads.cifar10 import Cifar10ResNet20, Cifar10VGG16
from sidco_ddp.workloads.digits import Digits
from sidco_ddp.workloads.imagenet import ImageNetResNet50, ImageNetVGG19
from sidco_ddp.workloads.ptb_lstm import PtbLstm
from sidco_ddp.workloads.recipe import Recipe, SettingError, override

__all__ = [
    "SCALES",
    "TASKS",
    "Batch",
    "DataError",
    "DataSource",
    "Recipe",
    "SettingError",
    "Shard",
    "Task",
    "global_order",
    "local_batches",
    "make_task",
]

SCALES = ("paper", "small")

TASKS: dict[str, type[Task]] = {
    "digits": Digits,
    "cifar10-resnet20": Cifar10ResNet20,
    "cifar10-vgg16": Cifar10VGG16,
    "imagenet-resnet50": ImageNetResNet50,
    "imagenet-vgg19": ImageNetVGG19,
    "ptb-lstm": PtbLstm,
    "an4-lstm": An4Lstm,
}


def make_task(
    name: str, scale: str = "paper", settings: Mapping[str, str] | None = None, source: DataSource | None = None
) -> Task:
    """Build the task called `name` at a scale, with some settings of its recipe replaced.

    Raises:
        ValueError: the name or the scale is unknown; the message lists the known ones.
        SettingError: a setting is unknown or out of range.
        DataError: the data cannot be had.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; choose from {', '.join(TASKS)}")
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r} is unknown; choose from {', '.join(SCALES)}")
    kind = TASKS[name]
    return kind(override(kind.recipes[scale], settings or {}), source or DataSource())
