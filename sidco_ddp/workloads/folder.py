"""Images in folders, one a class, under train/ and val/: what is there, and whether it can be used."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sidco_ddp.workloads.base import DataError, DataSource, find_folder

if TYPE_CHECKING:
    from PIL import Image

CHECKED_FILES = 5000  # of so many files, or fewer, every one is read at the start; of more, a bad one shows when read
_SOURCE = "expected are train/ and val/ with one folder of images a class, such as ImageNet's from image-net.org"


class Listing(NamedTuple):
    """Images, and the number of the class of each."""

    images: list[str | int]  # the path of a file; or the number of an invented image
    labels: list[int]

    def spread(self, samples: int | None) -> "Listing":
        """So many images (None: all) at even distances, and so of every class alike: files are sorted by class."""
        if samples is None or samples >= len(self.images):
            return self
        chosen = [number * len(self.images) // samples for number in range(samples)]
        return Listing([self.images[at] for at in chosen], [self.labels[at] for at in chosen])

    def check(self) -> None:
        """Read every file, where there are few.

        Raises:
            DataError: one cannot be read.
        """
        if len(self.images) <= CHECKED_FILES:
            for path in self.images:
                read_image(str(path), coarsely=True)


class Folder(NamedTuple):
    """The classes of a data set, in the order of their numbers, and its files."""

    classes: list[str]
    train: Listing
    val: Listing


def open_folder(source: DataSource, name: str) -> Folder:
    """List the data set `name`: the data folder, or the folder of that name in it.

    Raises:
        DataError: there is none, a class has no images, or train/ and val/ have different classes.
    """
    if not source.data_dir.is_dir():
        raise DataError(f"--data-dir {str(source.data_dir)!r}: there is no such folder; {_SOURCE}, or give --synthetic")
    root = find_folder(source, name, holds="train", remedy=_SOURCE)
    classes, train = _list(root / "train")
    val_classes, val = _list(root / "val")
    if classes != val_classes:
        differing = sorted(set(classes) ^ set(val_classes))
        named = ", ".join(f"{kind!r} is only in {'train' if kind in classes else 'val'}/" for kind in differing[:4])
        more = f", and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise DataError(f"{str(root)!r}: train/ and val/ have different classes: {named}{more}; make them the same")
    return Folder(classes, train, val)


def _list(folder: Path) -> tuple[list[str], Listing]:
    from torchvision.datasets import ImageFolder

    if not folder.is_dir():
        raise DataError(f"{str(folder)!r}: there is no such folder; {_SOURCE}")
    try:
        listed = ImageFolder(str(folder), allow_empty=True)
    except FileNotFoundError as error:
        raise DataError(f"{str(folder)!r}: there is no folder of a class in it; {_SOURCE}") from error
    files = Listing([path for path, _ in listed.samples], [label for _, label in listed.samples])
    empty = sorted(set(range(len(listed.classes))) - set(files.labels))
    if empty:
        path = str(folder / listed.classes[empty[0]])
        raise DataError(f"{path!r}: there are no images of this class; add some (.jpg, .png, .webp) or remove it")
    return listed.classes, files


def read_image(path: str, *, coarsely: bool = False) -> "Image.Image":
    """The image in a file, with three channels; `coarsely`: of a smaller size, where that is faster.

    Raises:
        DataError: it cannot be read.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            if coarsely:
                image.draft("RGB", (1, 1))
            converted: Image.Image = image.convert("RGB")
            return converted
    except Exception as error:  # PIL raises whatever the broken file leads to
        text = " ".join(str(error).split())
        raise DataError(f"{path!r}: this image cannot be read ({text}); replace it or remove it") from error
