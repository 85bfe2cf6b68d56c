"""CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 pixels in ten classes (Krizhevsky, 2009)."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from sidco_ddp.workloads.base import DataError, DataSource, require_library
from sidco_ddp.workloads.images import InMemoryImages, normalised
from sidco_ddp.workloads.models.resnet20 import ResNet20
from sidco_ddp.workloads.models.vgg_small import VGG16
from sidco_ddp.workloads.recipe import Recipe

_CLASSES = 10
_SYNTHETIC = (2048, 512)  # training and test images
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pixels, by channel


@dataclass(frozen=True, kw_only=True)
class Cifar10Recipe(Recipe):
    """`width` is the number of channels of the first group of layers; the others are in proportion."""

    width: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("width", self.width >= 1, "at least 1")


_RESNET20 = Cifar10Recipe(
    epochs=140, batch_size=512, lr=0.1, optimizer="sgd", momentum=0.9, weight_decay=1e-4, width=16
)
_VGG16 = replace(_RESNET20, weight_decay=5e-4, width=64)


class Cifar10(InMemoryImages):
    """CIFAR-10 with the usual augmentation: moved by up to four pixels, and mirrored."""

    shift, flips = 4, True
    network: Callable[[int, int], nn.Module]  # of so many classes, and channels in its first layers

    def __init__(self, recipe: Cifar10Recipe, source: DataSource) -> None:
        super().__init__(recipe, source)
        self.width = recipe.width
        images, labels = _invent(_SYNTHETIC[0]) if source.synthetic else _load(source, train=True)
        self.train_images, self.train_labels = images[: recipe.train_samples], labels[: recipe.train_samples]
        images, labels = _invent(_SYNTHETIC[1]) if source.synthetic else _load(source, train=False)
        self.test_images, self.test_labels = images[: recipe.test_samples], labels[: recipe.test_samples]

    def prepare(self, images: Tensor) -> Tensor:
        """Floats of mean 0 and variance 1, by channel, from bytes."""
        return normalised(images, _MEAN, _DEVIATION)

    def make_model(self) -> nn.Module:
        """A new model, initialised from torch's global random state."""
        return self.network(_CLASSES, self.width)


class Cifar10ResNet20(Cifar10):
    """CIFAR-10 on ResNet-20."""

    name = "cifar10-resnet20"
    network = ResNet20
    recipes: ClassVar = {
        "paper": _RESNET20,
        "small": replace(
            _RESNET20, epochs=4, batch_size=16, lr=0.05, warmup_epochs=1.0, train_samples=10_000, evaluate_every=2
        ),
    }


class Cifar10VGG16(Cifar10):
    """CIFAR-10 on VGG-16."""

    name = "cifar10-vgg16"
    network = VGG16
    recipes: ClassVar = {
        "paper": _VGG16,
        "small": replace(
            _VGG16,
            epochs=8,
            batch_size=32,
            lr=0.02,
            warmup_epochs=1.0,
            train_samples=5_000,
            test_samples=2_000,
            evaluate_every=2,
            width=16,
        ),
    }


def _load(source: DataSource, *, train: bool) -> tuple[Tensor, Tensor]:
    """Images (samples, 3, 32, 32) of bytes, and labels, in the official order."""
    datasets = require_library("torchvision.datasets", "torchvision", "CIFAR-10")
    inside = source.data_dir / "cifar10"
    root = inside if inside.exists() or source.download else source.data_dir
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, about the format of the official files
            data = datasets.CIFAR10(root=str(root), train=train, download=source.download)
    except Exception as error:  # torchvision raises whatever the file or the network does
        raise DataError(
            f"--data-dir {str(source.data_dir)!r}: CIFAR-10 is not there whole ({error}); expected are the files of "
            "cifar-10-batches-py/ in it or in its folder cifar10/, from "
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz; give --download to fetch them, or --synthetic"
        ) from error
    return torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets)


def _invent(samples: int) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    random = torch.Generator().manual_seed(samples)
    images = torch.randint(256, (samples, 3, 32, 32), dtype=torch.uint8, generator=random)
    return images, torch.randint(_CLASSES, (samples,), generator=random)
