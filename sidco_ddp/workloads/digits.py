"""The default task: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, which come with the library."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from sidco_ddp.workloads.base import DataSource, require_library
from sidco_ddp.workloads.images import InMemoryImages
from sidco_ddp.workloads.models.resnet_small import SmallResNet
from sidco_ddp.workloads.recipe import Recipe

_NUM_CLASSES = 10
_NUM_SYNTHETIC = 1797

_RECIPE = Recipe(
    epochs=30,
    batch_size=32,
    lr=0.05,
    optimizer="sgd",
    momentum=0.9,
    weight_decay=5e-4,
    warmup_epochs=3.0,
    schedule="cosine",
)


class Digits(InMemoryImages):
    """Handwritten digits on a small residual network; every fourth image of each class is a test image."""

    name = "digits"
    recipes: ClassVar = {"paper": _RECIPE, "small": _RECIPE}
    shift, flips = 1, False

    def __init__(self, recipe: Recipe, source: DataSource) -> None:
        super().__init__(recipe, source)
        images, labels = _invent() if source.synthetic else _load()
        test = _is_test(labels)
        self.train_images = images[~test][: recipe.train_samples]
        self.train_labels = labels[~test][: recipe.train_samples]
        self.test_images, self.test_labels = images[test][: recipe.test_samples], labels[test][: recipe.test_samples]

    def make_model(self) -> nn.Module:
        """A new model, initialised from torch's global random state."""
        return SmallResNet(in_channels=1, num_classes=_NUM_CLASSES)


def _load() -> tuple[Tensor, Tensor]:
    """All images, (1797, 1, 8, 8) in [0, 1], and their labels."""
    digits = require_library("sklearn.datasets", "scikit-learn", "task 'digits'").load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    return images, torch.as_tensor(digits.target, dtype=torch.int64)


def _invent() -> tuple[Tensor, Tensor]:
    """Random images and labels of the same shapes."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(_NUM_SYNTHETIC, 1, 8, 8, generator=random)
    return images, torch.randint(_NUM_CLASSES, (_NUM_SYNTHETIC,), generator=random)


def _is_test(labels: Tensor) -> Tensor:
    """Mark every fourth sample of each class, so that the split is fixed and both parts hold all classes."""
    test = torch.zeros_like(labels, dtype=torch.bool)
    for label in range(_NUM_CLASSES):
        test[torch.nonzero(labels == label).squeeze(1)[3::4]] = True
    return test
