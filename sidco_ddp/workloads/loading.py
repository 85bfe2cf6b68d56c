"""Batches of images from files, read and augmented in this process or in others."""

import math
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sidco_ddp.workloads.base import DataError
from sidco_ddp.workloads.folder import read_image

Box = tuple[float, float, float, float]  # left, upper, right, lower
Images = tuple[Tensor, Tensor]  # bytes (batch, 3, size, size), and labels (batch,) of int64
Kind = TypeVar("Kind")

_CENTRE = 224 / 256  # of the shorter side: what a test image is cut down to
_RATIOS = (3 / 4, 4 / 3)  # of the width to the height of a random crop
_TRIES = 10


class Sample(NamedTuple):
    """What a process must know to make one sample of a batch."""

    image: str | int  # the path of a file; or the number of an invented image
    label: int
    key: tuple[int, ...] | None = None  # what its augmentation is drawn from; None: the centre, as it is


class Reader(Dataset[Images | DataError]):
    """Makes batches, each from its samples; it holds no list of files, so that it is cheap to send to a process.

    Args:
        size: of the images that it makes, which are square.
        least_area: of a random crop, as a fraction of the image.
    """

    def __init__(self, size: int, least_area: float) -> None:
        self.size, self.least_area = size, least_area

    def __getitem__(self, samples: list[Sample]) -> Images | DataError:
        """The batch, or what is wrong with its data: a loading process can hand over an error, but not raise it."""
        pixels = np.empty((len(samples), self.size, self.size, 3), dtype=np.uint8)
        for row, sample in zip(pixels, samples, strict=True):
            try:
                row[:] = self._make(sample)
            except DataError as error:
                return error
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        return images, torch.tensor([sample.label for sample in samples])

    def _make(self, sample: Sample) -> np.ndarray:
        from PIL.Image import Resampling

        if isinstance(sample.image, int):
            shape = (self.size, self.size, 3)
            return np.random.default_rng(sample.image).integers(256, size=shape, dtype=np.uint8)
        image = read_image(sample.image)
        random = None if sample.key is None else np.random.default_rng(sample.key)
        mirrored = random is not None and random.random() < 0.5
        box = central_box(*image.size) if random is None else random_box(*image.size, self.least_area, random)
        pixels = np.asarray(image.resize((self.size, self.size), Resampling.BILINEAR, box))
        return pixels[:, ::-1] if mirrored else pixels


def central_box(width: int, height: int) -> Box:
    """The square in the middle that is left of an image resized to 256 and cut to 224, whatever its size."""
    side = _CENTRE * min(width, height)
    return _middle(width, height, side, side)


def random_box(width: int, height: int, least_area: float, random: np.random.Generator) -> Box:
    """Inception's crop: a random part of the area, of a random ratio; after some tries, the largest central one."""
    for _ in range(_TRIES):
        area = width * height * random.uniform(least_area, 1.0)
        ratio = math.exp(random.uniform(math.log(_RATIOS[0]), math.log(_RATIOS[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, upper = int(random.integers(width - across + 1)), int(random.integers(height - down + 1))
            return left, upper, left + across, upper + down
    return _middle(width, height, min(width, height * _RATIOS[1]), min(height, width / _RATIOS[0]))


def _middle(width: int, height: int, across: float, down: float) -> Box:
    left, upper = (width - across) / 2, (height - down) / 2
    return left, upper, left + across, upper + down


def load(reader: Reader, batches: Iterable[list[Sample]], workers: int) -> Iterator[Images]:
    """The batches in their order, made ahead of their use by `workers` processes, or, with 0, here when needed.

    The processes are not forked from this one, whose process group and CUDA would not survive that, so a script that
    trains needs the usual ``if __name__ == "__main__":``. They end with the iterator.

    Raises:
        DataError: an image cannot be read.
    """
    loader = DataLoader(
        reader,
        batch_size=None,  # the sampler's items are batches
        sampler=batches,
        collate_fn=_as_it_is,
        num_workers=workers,
        multiprocessing_context=_context() if workers else None,
        worker_init_fn=_leave_interrupts_to_the_trainer,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own: a number drawn from the global one would change the training
    )
    for batch in loader:
        if isinstance(batch, DataError):
            raise batch
        images, labels = batch
        yield images, labels


def _context() -> BaseContext:
    """How processes start: from one that has imported all that is slow and has started nothing, where there is such."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    return context


def _as_it_is(batch: Kind) -> Kind:
    return batch


def _leave_interrupts_to_the_trainer(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
