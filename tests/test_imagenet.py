"""ImageNet's tasks: the published networks, the same pixels however they are dealt out, and what is refused."""

import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from sidco_ddp.workloads import TASKS, Batch, DataError, DataSource, SettingError, Shard, make_task
from sidco_ddp.workloads import folder as folder_module
from sidco_ddp.workloads.imagenet import ImageNet
from sidco_ddp.workloads.loading import central_box, random_box
from sidco_ddp.workloads.models.resnet50 import resnet50
from sidco_ddp.workloads.models.vgg19 import vgg19

NAMES = ("imagenet-resnet50", "imagenet-vgg19")
TRAIN, VAL = {"cat": 7, "dog": 8, "emu": 5}, {"cat": 3, "dog": 3, "emu": 5}
few_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def invent_folder(root: Path, parts: dict[str, dict[str, int]]) -> Path:
    """Pictures of a few sizes and shapes in files of two formats, one of them without colours."""
    random = np.random.default_rng(0)
    for part, classes in parts.items():
        for kind, count in classes.items():
            (root / part / kind).mkdir(parents=True)
            for number in range(count):
                shape = (40 + 7 * number, 64 - 5 * number) + ((3,) if number else ())
                pixels = random.integers(256, size=shape, dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / kind / f"{number}.{'png' if number % 2 else 'jpg'}")
    return root


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return invent_folder(tmp_path_factory.mktemp("pictures"), {"train": TRAIN, "val": VAL})


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder of images to be broken."""
    return invent_folder(tmp_path / "set", {"train": {"cat": 2, "dog": 2}, "val": {"cat": 1, "dog": 1}})


def make(data_dir: Path, *, workers: int = 0, **settings: str) -> ImageNet:
    source = DataSource(data_dir=data_dir, workers=workers)
    return cast(ImageNet, make_task(NAMES[0], "small", {"image_size": "32", **settings}, source))


def batches(task: ImageNet, shard: Shard, batch_size: int, *, epoch: int = 2, first: int = 0) -> list[Batch]:
    return list(task.batches(seed=3, epoch=epoch, shard=shard, batch_size=batch_size, first=first))


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(left, right, strict=True)
    )


def parameters(make_model: Callable[[int, int], nn.Module], num_classes: int, width: int = 64) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model(num_classes, width).parameters())


@pytest.mark.parametrize(
    ("make_model", "num_classes", "count"),
    [
        (resnet50, 1000, 25_557_032),
        (resnet50, 1001, 25_559_081),
        (vgg19, 1000, 143_667_240),
        (vgg19, 1001, 143_671_337),
    ],
)
def test_the_networks_have_the_published_sizes(
    make_model: Callable[[int, int], nn.Module], num_classes: int, count: int
) -> None:
    assert parameters(make_model, num_classes) == count


@pytest.mark.parametrize("make_model", [resnet50, vgg19])
def test_the_narrow_networks_are_the_published_ones_made_narrower(
    make_model: Callable[[int, int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        full = [parameter.shape for parameter in make_model(10, 64).parameters()]
        monkeypatch.setattr(sys.modules[make_model.__module__], "FULL_WIDTH", -1)
        ours = [parameter.shape for parameter in make_model(10, 64).parameters()]
        narrow = [parameter.shape for parameter in make_model(10, 16).parameters()]
    assert sorted(ours) == sorted(full)
    assert len(narrow) == len(full)
    assert sum(map(math.prod, narrow)) < sum(map(math.prod, full)) / 10


@pytest.mark.parametrize("name", NAMES)
def test_random_data_needs_no_files(name: str, tmp_path: Path) -> None:
    task = make_task(name, "small", {"image_size": "32"}, DataSource(data_dir=tmp_path / "none", synthetic=True))
    assert isinstance(task, ImageNet)
    assert (task.num_train_samples, task.num_classes) == (512, 10)
    batch = next(iter(task.batches(seed=0, epoch=0, shard=Shard(), batch_size=4)))
    assert (batch[0].shape, batch[0].dtype, batch[1].shape) == ((4, 3, 32, 32), torch.uint8, (4,))
    model = task.make_model()
    loss = task.loss(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(10), abs=2)
    assert task.evaluate(model, Shard(1, 2))[1] == 64


@pytest.mark.parametrize("name", NAMES)
def test_at_full_scale_random_data_is_of_imagenets_shape(name: str) -> None:
    task = make_task(name, source=DataSource(synthetic=True))
    assert isinstance(task, ImageNet)
    assert next(iter(task.batches(seed=0, epoch=0, shard=Shard(), batch_size=2)))[0].shape == (2, 3, 224, 224)
    with torch.device("meta"):
        assert [*task.make_model().parameters()][-1].shape == (1000,)


@pytest.mark.parametrize("name", NAMES)
def test_the_full_recipe_is_the_papers(name: str) -> None:
    recipe = TASKS[name].recipes["paper"]
    assert (recipe.batch_size, recipe.epochs, recipe.optimizer, recipe.momentum) == (160, 90, "nesterov", 0.9)
    assert (recipe.lr, recipe.weight_decay) == ((0.2, 1e-4) if name == NAMES[0] else (0.05, 5e-4))
    assert (recipe.warmup_epochs, recipe.schedule, recipe.decay_at) == (5, "step", (0.5, 0.75))


@few_cores
@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_is_the_same_however_it_is_dealt_out(pictures: Path, workers: int) -> None:
    alone, task = make(pictures), make(pictures, workers=workers)
    assert alone.num_train_samples == 20
    whole = batches(alone, Shard(), 6)
    assert len(whole) == 3
    for world_size in (1, 2, 3):
        parts = [batches(task, Shard(rank, world_size), 6 // world_size) for rank in range(world_size)]
        joined = [tuple(map(torch.cat, zip(*of_ranks, strict=True))) for of_ranks in zip(*parts, strict=True)]
        assert equal(whole, joined)
    assert equal(whole[1:], batches(task, Shard(), 6, first=1))
    assert not equal(whole, batches(alone, Shard(), 6, epoch=3))


@few_cores
@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_global_random_state_alone(pictures: Path, workers: int) -> None:
    """A number drawn for the loading would change the dropout of a resumed epoch."""
    task = make(pictures, workers=workers)
    before = torch.get_rng_state()
    batches(task, Shard(), 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_image_is_cropped_and_mirrored_anew_in_every_epoch(pictures: Path) -> None:
    """White on the left, black on the right: mirrored half of the time, and never cut the same."""
    task = make(pictures)
    halves = np.repeat(np.array([255, 0], dtype=np.uint8), 32)[None].repeat(64, axis=0)
    path = pictures / "halves.png"
    Image.fromarray(halves).save(path)
    task.train.images[:] = [str(path)] * 20
    images = torch.cat([batch[0] for epoch in range(5) for batch in batches(task, Shard(), 20, epoch=epoch)])
    brighter_on_the_right = (images[..., -1].float().mean((1, 2)) > images[..., 0].float().mean((1, 2))).float().mean()
    assert 0.3 < brighter_on_the_right < 0.7
    assert len(torch.unique(images.flatten(1), dim=0)) > 60


def test_random_boxes_are_of_the_wanted_areas_and_ratios() -> None:
    random = np.random.default_rng(0)
    boxes = np.array([random_box(400, 300, 0.08, random) for _ in range(2000)])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() == 0
    assert boxes[:, 2].max() == 400
    assert boxes[:, 3].max() == 300
    assert 0.07 < (across * down).min() / 120_000 < 0.1
    assert (across * down).max() / 120_000 > 0.9
    assert (across / down).min() == pytest.approx(3 / 4, abs=0.02)
    assert (across / down).max() == pytest.approx(4 / 3, abs=0.02)
    assert random_box(1000, 10, 1.0, random) == pytest.approx((493.333, 0, 506.667, 10), abs=0.01)  # nothing fits
    assert random_box(10, 1000, 1.0, random) == pytest.approx((0, 493.333, 10, 506.667), abs=0.01)
    assert central_box(256, 512) == (16, 144, 240, 368)


def test_test_images_are_the_centre_and_normalised(tmp_path: Path) -> None:
    """torchvision's evaluation, resized to 256/224 and cut, agrees up to its two roundings."""
    from torchvision.transforms import v2

    root = invent_folder(tmp_path, {"train": {"cat": 1}, "val": {"cat": 1}})
    smooth = np.linspace(0, 255, 150 * 100 * 3).reshape(150, 100, 3).astype(np.uint8)
    path = root / "val" / "cat" / "0.jpg"
    Image.fromarray(smooth).save(path, quality=100)
    task = make(root, image_size="56")
    ((images, labels),) = task.test_batches(Shard())
    assert labels.tolist() == [0]
    expected = v2.Compose([v2.Resize(64), v2.CenterCrop(56), v2.PILToTensor()])(Image.open(path))
    assert (images[0].float() - expected.float()).abs().max() <= 3
    normalised = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))(images / 255)
    assert torch.allclose(task.model_input(images), normalised, atol=1e-5)


@few_cores
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("world_size", [1, 3, 13])
def test_every_test_image_is_counted_once(pictures: Path, world_size: int, workers: int) -> None:
    """A model that always says "dog" is right on the dogs: 3 of 11, over shards that are uneven, or empty."""

    class AlwaysDog(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.eye(3)[1])

        def forward(self, images: Tensor) -> Tensor:
            assert not self.training
            return self.scores.expand(len(images), 3)

    if workers and world_size == 13:
        pytest.skip("as many processes, and nothing new")
    task = make(pictures, workers=workers)
    sums = torch.stack([task.evaluate(AlwaysDog(), Shard(rank, world_size)) for rank in range(world_size)])
    assert sums.sum(dim=0).tolist() == [3, 11]
    assert sums[:, 1].max() - sums[:, 1].min() <= 1
    assert task.metrics(sums.sum(dim=0)) == {"accuracy": pytest.approx(3 / 11)}


def test_fewer_samples_are_of_all_classes(pictures: Path) -> None:
    task = make(pictures, train_samples="6", test_samples="3")
    assert np.bincount(task.train.labels).tolist() == [3, 2, 1]  # of 7, 8 and 5, at even distances
    assert task.test.labels == [0, 1, 2]
    assert make(pictures, train_samples="99").num_train_samples == 20


@few_cores
def test_loading_processes_end_when_an_epoch_is_left(pictures: Path) -> None:
    before = set(multiprocessing.active_children())
    running: Iterator[Batch] = iter(make(pictures, workers=2).batches(seed=0, epoch=0, shard=Shard(), batch_size=2))
    next(running)
    started = [process for process in multiprocessing.active_children() if process not in before]
    assert len(started) == 2
    del running
    psutil.wait_procs([psutil.Process(process.pid) for process in started if process.is_alive()], timeout=10)
    assert not any(process.is_alive() for process in started)


def test_a_folder_of_the_name_inside_is_found(tmp_path: Path) -> None:
    invent_folder(tmp_path / "imagenet", {"train": {"cat": 1}, "val": {"cat": 1}})
    assert make(tmp_path).num_train_samples == 1


def refusal(data_dir: Path, **settings: str) -> str:
    with pytest.raises(DataError) as caught:
        make(data_dir, **settings)
    text = str(caught.value)
    assert "\n" not in text
    return text


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def test_missing_folders_are_named_with_the_remedy(broken: Path, tmp_path: Path) -> None:
    text = refusal(tmp_path / "nowhere")
    assert f"{str(tmp_path / 'nowhere')!r}: there is no such folder" in text
    assert "--synthetic" in text
    text = refusal(broken / "train")
    assert str(broken / "train") in text
    assert "expected are train/ and val/" in text
    remove(broken / "val")
    assert f"{str(broken / 'val')!r}: there is no such folder; expected are train/ and val/" in refusal(broken)
    remove(broken / "train")
    (broken / "train").mkdir()
    assert f"{str(broken / 'train')!r}: there is no folder of a class" in refusal(broken)


def test_an_empty_class_is_named(broken: Path) -> None:
    for path in (broken / "val" / "dog").iterdir():
        path.unlink()
    (broken / "val" / "dog" / "notes.txt").write_text("no image")
    assert f"{str(broken / 'val' / 'dog')!r}: there are no images of this class; add some" in refusal(broken)


def test_classes_that_differ_are_named(broken: Path) -> None:
    (broken / "val" / "dog").rename(broken / "val" / "wolf")
    text = refusal(broken)
    assert f"{str(broken)!r}: train/ and val/ have different classes" in text
    assert "'dog' is only in train/, 'wolf' is only in val/; make them the same" in text


def damage(broken: Path, how: str, part: str = "train") -> Path:
    path = broken / part / "dog" / "0.jpg"
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "text": b"no image"}[how])
    return path


@pytest.mark.parametrize("how", ["cut", "empty", "text"])
@pytest.mark.parametrize("part", ["train", "val"])
def test_a_bad_image_of_a_small_set_is_named_at_the_start(broken: Path, part: str, how: str) -> None:
    path = damage(broken, how, part)
    assert f"{str(path)!r}: this image cannot be read" in refusal(broken)


@few_cores
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_of_a_large_set_is_named_when_it_is_read(
    broken: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damage(broken, "cut")
    monkeypatch.setattr(folder_module, "CHECKED_FILES", 3)
    with pytest.raises(DataError) as caught:
        batches(make(broken, workers=workers), Shard(), 4)
    assert str(caught.value).startswith(f"{str(path)!r}: this image cannot be read (")
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_named_with_its_remedy(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert "needs torchvision" in (text := refusal(pictures))
    assert "pip install 'sidco_ddp[train]'" in text


@pytest.mark.parametrize(
    "setting", ["image_size=31", "width=0", "least_area=0", "least_area=1.1", "synthetic_classes=0"]
)
def test_settings_out_of_range_are_refused(setting: str) -> None:
    name, value = setting.split("=")
    with pytest.raises(SettingError, match=f"setting {name}="):
        make_task(NAMES[0], "small", {name: value}, DataSource(synthetic=True))


@pytest.fixture(scope="module")
def imagenette() -> Path:
    """A slice of ImageNet, 10 classes of 100 and 25 images of 128 x 128 pixels, in the folder that SIDCO_DATA names."""
    path = Path(os.environ.get("SIDCO_DATA", "")) / "imagenette128"
    if "SIDCO_DATA" not in os.environ or not path.is_dir():
        pytest.skip("needs real images: imagenette128/ in the folder that SIDCO_DATA names")
    return path


def test_the_slice_is_complete(imagenette: Path) -> None:
    task = make(imagenette)
    assert np.bincount(task.train.labels).tolist() == [100] * 10
    assert np.bincount(task.test.labels).tolist() == [25] * 10


def test_a_narrow_network_learns_the_slice(imagenette: Path) -> None:
    """Two classes that differ, in a few epochs: a check of images against labels, not of the recipe."""
    task = make(imagenette, train_samples="200", test_samples="100")
    torch.manual_seed(0)
    model = resnet50(10, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(8):
        for batch in batches(task, Shard(), 20, epoch=epoch):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
    assert task.metrics(task.evaluate(model, Shard()))["accuracy"] > 0.15
