"""ImageNet, or any other images in folders by class, on ResNet-50 and VGG-19."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from sidco_ddp.workloads.base import Batch, DataSource, Shard, global_order, local_batches, require_library
from sidco_ddp.workloads.folder import Listing, open_folder
from sidco_ddp.workloads.images import EVALUATION_BATCH, ImageClassification, normalised
from sidco_ddp.workloads.loading import Reader, Sample, load
from sidco_ddp.workloads.models.resnet50 import resnet50
from sidco_ddp.workloads.models.vgg19 import vgg19
from sidco_ddp.workloads.recipe import Recipe

_SYNTHETIC = (512, 128)  # training and test images
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in [0, 1], by channel


@dataclass(frozen=True, kw_only=True)
class ImageNetRecipe(Recipe):
    """Of `train_samples` and `test_samples`, the images are taken at even distances, and so of all classes alike."""

    image_size: int = 224
    width: int = 64  # channels of the first convolution, the others in proportion; 64: the published network
    least_area: float = 0.08  # of the random crop that is trained on, as a fraction of the image
    synthetic_classes: int = 1000  # with data from files, the classes are those found

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("image_size", self.image_size >= 32, "at least 32: the networks halve an image five times")
        self.require("width", self.width >= 1, "at least 1")
        self.require("least_area", 0 < self.least_area <= 1, "a fraction above 0 and at most 1")
        self.require("synthetic_classes", self.synthetic_classes >= 1, "at least 1")


_RESNET50 = ImageNetRecipe(
    epochs=90, batch_size=160, lr=0.2, optimizer="nesterov", momentum=0.9, weight_decay=1e-4, warmup_epochs=5.0
)
_VGG19 = replace(_RESNET50, lr=0.05, weight_decay=5e-4)


class ImageNet(ImageClassification):
    """Images in the folders train/<class>/ and val/<class>/.

    Trained on random crops of random size and ratio, mirrored half of the time; tested on the centre.
    """

    network: Callable[[int, int], nn.Module]  # of so many classes, and channels in its first layer

    def __init__(self, recipe: ImageNetRecipe, source: DataSource) -> None:
        super().__init__(recipe, source)
        require_library("torchvision", "torchvision", f"task {self.name!r}")
        self.reader, self.width = Reader(recipe.image_size, recipe.least_area), recipe.width
        if source.synthetic:
            self.num_classes = recipe.synthetic_classes
            train, test = _invent(self.num_classes)
        else:
            folder = open_folder(source, "imagenet")
            self.num_classes, train, test = len(folder.classes), folder.train, folder.val
        self.train, self.test = train.spread(recipe.train_samples), test.spread(recipe.test_samples)
        if not source.synthetic:
            self.train.check()
            self.test.check()

    @property
    def num_train_samples(self) -> int:
        """How many samples one epoch draws from, over all shards together."""
        return len(self.train.images)

    def batches(self, *, seed: int, epoch: int, shard: Shard, batch_size: int, first: int = 0) -> Iterator[Batch]:
        """This shard's batches of an epoch: bytes (batch, 3, size, size), and labels (batch,) of int64."""
        order = global_order(self.num_train_samples, seed=seed, epoch=epoch)

        def sample(place: int) -> Sample:
            # A position of the order has its own crop, so that the data is the same however it is dealt out.
            chosen = order[place]
            return Sample(self.train.images[chosen], self.train.labels[chosen], key=(seed, epoch, 1, place))

        work = (
            [sample(place) for place in range(part.start, part.stop)]
            for part in local_batches(len(order), shard, batch_size, first)
        )
        return load(self.reader, work, self.source.workers)

    def test_batches(self, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        """Every `world_size`-th test image: bytes (batch, 3, size, size), and labels (batch,) of int64."""
        samples = [Sample(*pair) for pair in zip(*self.test, strict=True)][shard.rank :: shard.world_size]
        starts = range(0, len(samples), EVALUATION_BATCH)
        return load(self.reader, (samples[at : at + EVALUATION_BATCH] for at in starts), self.source.workers)

    def model_input(self, images: Tensor) -> Tensor:
        """Floats of mean 0 and variance 1, by channel, from bytes, on their device."""
        return normalised(images, _MEAN, _DEVIATION)

    def make_model(self) -> nn.Module:
        """A new model, initialised from torch's global random state."""
        return self.network(self.num_classes, self.width)


class ImageNetResNet50(ImageNet):
    """ImageNet on ResNet-50."""

    name = "imagenet-resnet50"
    network = staticmethod(resnet50)
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "paper": _RESNET50,
        "small": replace(
            _RESNET50,
            epochs=30,
            batch_size=16,
            lr=0.02,
            warmup_epochs=2.0,
            image_size=64,
            width=16,
            least_area=0.35,
            synthetic_classes=10,
            evaluate_every=5,
        ),
    }


class ImageNetVGG19(ImageNet):
    """ImageNet on VGG-19, without batch norm as in the paper.

    The small form therefore learns slowly: on ten classes of a hundred images it stays at chance for some epochs, and
    classifies about a fifth of the test images rightly in the end.
    """

    name = "imagenet-vgg19"
    network = staticmethod(vgg19)
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "paper": _VGG19,
        "small": replace(
            _VGG19,
            epochs=24,
            batch_size=4,
            lr=0.004,
            warmup_epochs=2.0,
            clip_norm=5.0,
            image_size=64,
            width=8,
            least_area=0.35,
            synthetic_classes=10,
            evaluate_every=5,
        ),
    }


def _invent(num_classes: int) -> tuple[Listing, Listing]:
    """Numbers of random images, to be made when they are read, and random labels."""
    random = np.random.default_rng(0)
    numbers = list(range(sum(_SYNTHETIC)))
    labels = random.integers(num_classes, size=len(numbers)).tolist()
    end = _SYNTHETIC[0]
    return Listing([*numbers[:end]], labels[:end]), Listing([*numbers[end:]], labels[end:])
