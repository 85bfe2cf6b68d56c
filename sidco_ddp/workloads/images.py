"""What tasks that classify images have in common."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sidco_ddp.workloads.base import Batch, Shard, Task, evaluating, global_order, local_batches

EVALUATION_BATCH = 256


class ImageClassification(Task):
    """Cross-entropy, and the top-1 accuracy over the test images."""

    metric_name = "accuracy"
    higher_is_better = True
    metric_range = (0.0, 1.0)

    @abstractmethod
    def test_batches(self, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of this shard's part of the test data."""

    def model_input(self, images: Tensor) -> Tensor:
        """What the model is given of a batch's images, on their device."""
        return images

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy over a batch."""
        images, labels = batch
        return F.cross_entropy(model(self.model_input(images)), labels)

    def evaluate(self, model: nn.Module, shard: Shard) -> Tensor:
        """How many of this shard's test images are classified rightly, and how many there are."""
        correct = count = 0
        with evaluating(model) as device:
            for images, labels in self.test_batches(shard):
                correct += int((model(self.model_input(images.to(device))).argmax(dim=1).cpu() == labels).sum())
                count += len(labels)
        return torch.tensor([correct, count], dtype=torch.float64)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The fraction of test images classified rightly."""
        return {"accuracy": float(sums[0] / sums[1])}


class InMemoryImages(ImageClassification):
    """All images in memory as tensors: (samples, channels, height, width), and int64 labels.

    Training images are moved by up to `shift` pixels in each direction and, with `flips`, mirrored half of the time.
    """

    shift: int
    flips: bool
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def prepare(self, images: Tensor) -> Tensor:
        """What the model is given of a batch of stored images."""
        return images

    @property
    def num_train_samples(self) -> int:
        """How many samples one epoch draws from, over all shards together."""
        return len(self.train_labels)

    def batches(self, *, seed: int, epoch: int, shard: Shard, batch_size: int, first: int = 0) -> Iterator[Batch]:
        """This shard's batches of an epoch, moved and mirrored."""
        order = torch.from_numpy(global_order(self.num_train_samples, seed=seed, epoch=epoch))
        # A position of the order has its own shift, so that the data is the same however it is dealt out.
        random = np.random.default_rng((seed, epoch, 1))
        corners = torch.from_numpy(random.integers(0, 2 * self.shift + 1, size=(len(order), 2)))
        mirrored = torch.from_numpy(random.integers(0, 2, size=len(order)).astype(bool))
        for part in local_batches(len(order), shard, batch_size, first):
            images = self.prepare(self.train_images[order[part]])
            images = crop(F.pad(images, (self.shift,) * 4), corners[part], self.shift)
            if self.flips:
                images = torch.where(mirrored[part][:, None, None, None], images.flip(3), images)
            yield images, self.train_labels[order[part]]

    def test_batches(self, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        """Every `world_size`-th test image, as it is."""
        images = self.test_images[shard.rank :: shard.world_size]
        labels = self.test_labels[shard.rank :: shard.world_size]
        for start in range(0, len(labels), EVALUATION_BATCH):
            part = slice(start, start + EVALUATION_BATCH)
            yield self.prepare(images[part]), labels[part]


def normalised(images: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """Floats of mean 0 and variance 1 from bytes, given those of the pixels in [0, 1], by channel."""
    means, deviations = (torch.tensor(values, device=images.device)[:, None, None] for values in (mean, deviation))
    return (images.float() / 255.0 - means) / deviations


def crop(padded: Tensor, corners: Tensor, shift: int) -> Tensor:
    """Cut a window from each image of (batch, channels, height + 2 shift, width + 2 shift), at its upper left corner.

    The result is contiguous: strides of channels-last, which convolutions hand on to their gradients, make DDP warn.
    """
    height, width = padded.shape[2] - 2 * shift, padded.shape[3] - 2 * shift
    windows = [
        image[:, row : row + height, column : column + width]
        for image, (row, column) in zip(padded, corners.tolist(), strict=True)
    ]
    return torch.stack(windows)
