"""The default task: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, which come with the library."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sidco_ddp.workloads.base import Batch, Recipe, Shard, global_order, local_batches
from sidco_ddp.workloads.models.resnet_small import SmallResNet

_NUM_CLASSES = 10
_EVALUATION_BATCH = 256


def _load() -> tuple[Tensor, Tensor]:
    """All images, (1797, 1, 8, 8) in [0, 1], and their labels."""
    try:
        # Here and not at the top: it takes a second, and only this task needs the library.
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ValueError(f"task 'digits' needs scikit-learn ({error}); pip install 'sidco_ddp[train]'") from error
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    return images, torch.as_tensor(digits.target, dtype=torch.int64)


def _is_test(labels: Tensor) -> Tensor:
    """Mark every fourth sample of each class, so that the split is fixed and both parts hold all classes."""
    test = torch.zeros_like(labels, dtype=torch.bool)
    for label in range(_NUM_CLASSES):
        test[torch.nonzero(labels == label).squeeze(1)[3::4]] = True
    return test


class Digits:
    """Handwritten digits on a small residual network; the metric is the top-1 accuracy on the test part."""

    name = "digits"
    metric_name = "accuracy"
    higher_is_better = True
    recipe = Recipe(
        epochs=30, batch_size=32, lr=0.05, optimizer="sgd", momentum=0.9, weight_decay=5e-4, warmup_epochs=3.0
    )

    def __init__(self) -> None:
        images, labels = _load()
        test = _is_test(labels)
        self.train_images, self.train_labels = images[~test], labels[~test]
        self.test_images, self.test_labels = images[test], labels[test]

    @property
    def num_train_samples(self) -> int:
        """How many samples one epoch draws from, over all shards together."""
        return len(self.train_labels)

    def make_model(self) -> nn.Module:
        """A new model, initialised from torch's global random state."""
        return SmallResNet(in_channels=1, num_classes=_NUM_CLASSES)

    def batches(self, *, seed: int, epoch: int, shard: Shard, batch_size: int) -> Iterator[Batch]:
        """This shard's batches of an epoch, each image moved by up to one pixel in each direction."""
        order = torch.from_numpy(global_order(self.num_train_samples, seed=seed, epoch=epoch))
        # A position of the order has its own shift, so that the data is the same however it is dealt out.
        shifts = torch.from_numpy(np.random.default_rng((seed, epoch, 1)).integers(0, 3, size=(len(order), 2)))
        for part in local_batches(len(order), shard, batch_size):
            samples = order[part]
            yield _crop(F.pad(self.train_images[samples], (1, 1, 1, 1)), shifts[part]), self.train_labels[samples]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy over a batch."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, shard: Shard) -> Tensor:
        """How many of this shard's test samples are classified rightly, and how many there are."""
        device = next(model.parameters()).device
        images = self.test_images[shard.rank :: shard.world_size]
        labels = self.test_labels[shard.rank :: shard.world_size]
        was_training = model.training
        model.eval()
        correct = 0
        for start in range(0, len(labels), _EVALUATION_BATCH):
            part = slice(start, start + _EVALUATION_BATCH)
            correct += int((model(images[part].to(device)).argmax(dim=1).cpu() == labels[part]).sum())
        model.train(was_training)
        return torch.tensor([correct, len(labels)], dtype=torch.float64)

    def metric(self, sums: Tensor) -> float:
        """The fraction of test samples classified rightly."""
        return float(sums[0] / sums[1])


def _crop(padded: Tensor, corners: Tensor) -> Tensor:
    """Cut from each image of (batch, 1, height + 2, width + 2) the window whose upper left corner is given."""
    rows = corners[:, :1] + torch.arange(padded.shape[2] - 2)
    columns = corners[:, 1:] + torch.arange(padded.shape[3] - 2)
    batch = torch.arange(len(padded))[:, None, None]
    # Without the channel while indexing: one of size 1 can end up with the strides of channels-last, which convolutions
    # hand on to their gradients and DDP then warns about.
    return padded.squeeze(1)[batch, rows[:, :, None], columns[:, None, :]].unsqueeze(1)
