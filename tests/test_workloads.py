"""The tasks: what is dealt to whom, and what is measured."""

import ast
import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sidco_ddp.workloads
from sidco_ddp.workloads import Batch, DataSource, Shard, Task, global_order, local_batches, make_task
from sidco_ddp.workloads.digits import Digits
from sidco_ddp.workloads.models.resnet20 import ResNet20
from sidco_ddp.workloads.models.resnet_small import SmallResNet
from sidco_ddp.workloads.models.vgg_small import VGG16

PACKAGE = Path(inspect.getfile(sidco_ddp.workloads)).parent


def make_digits() -> Digits:
    task = make_task("digits")
    assert isinstance(task, Digits)
    return task


@pytest.fixture(scope="module", params=["digits", "cifar10-resnet20", "cifar10-vgg16"])
def task(request: pytest.FixtureRequest) -> Task:
    """The tasks that hold their images in memory; the others have tests of their own."""
    if request.param == "digits":
        return make_task("digits")
    settings = {"width": "4", "train_samples": "100", "test_samples": "50"}
    return make_task(request.param, "small", settings, DataSource(synthetic=True))


def batches(
    task: Task, shard: Shard, *, seed: int = 3, epoch: int = 2, batch_size: int = 4
) -> list[tuple[Tensor, ...]]:
    return list(task.batches(seed=seed, epoch=epoch, shard=shard, batch_size=batch_size))


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [24, 29])
def test_shards_cover_the_order_once(num_samples: int, world_size: int) -> None:
    parts = [list(local_batches(num_samples, Shard(rank, world_size), 4)) for rank in range(world_size)]
    assert {len(part) for part in parts} == {num_samples // (4 * world_size)}  # no rank waits for another one's batch
    positions = [position for part in parts for where in part for position in range(num_samples)[where]]
    # all but an incomplete global batch, and that is the same positions for every world size with that global batch
    assert sorted(positions) == list(range(num_samples // (4 * world_size) * 4 * world_size))


def test_a_global_batch_that_does_not_fit_gives_no_batch() -> None:
    assert list(local_batches(7, Shard(0, 2), 4)) == []


def test_order_is_a_permutation_that_depends_on_seed_and_epoch_alone() -> None:
    order = global_order(50, seed=3, epoch=2)
    assert sorted(order) == list(range(50))
    torch.manual_seed(99)  # the global random state has no say
    assert (global_order(50, seed=3, epoch=2) == order).all()
    assert (global_order(50, seed=3, epoch=3) != order).any()
    assert (global_order(50, seed=4, epoch=2) != order).any()
    assert (global_order(50, seed=2, epoch=3) != order).any()


def test_batches_repeat_for_a_seed_and_epoch_and_change_with_either(task: Task) -> None:
    first = batches(task, Shard())
    torch.manual_seed(99)
    assert equal(first, batches(task, Shard()))
    assert not equal(first, batches(task, Shard(), epoch=3))
    assert not equal(first, batches(task, Shard(), seed=4))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ranks_batches_make_up_the_global_batch(task: Task, world_size: int) -> None:
    """However many workers share a global batch, it is the same one, augmentation included."""
    whole = batches(task, Shard(), batch_size=12)
    parts = [batches(task, Shard(rank, world_size), batch_size=12 // world_size) for rank in range(world_size)]
    joined = [
        tuple(torch.cat(tensors) for tensors in zip(*of_ranks, strict=True)) for of_ranks in zip(*parts, strict=True)
    ]
    assert equal(whole, joined)


def test_the_first_batches_can_be_left_out(task: Task) -> None:
    """As a resumed epoch does."""
    asked = {"seed": 3, "epoch": 2, "shard": Shard(1, 2), "batch_size": 4}
    assert equal(list(task.batches(**asked, first=5)), list(task.batches(**asked))[5:])


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_evaluation_over_ranks_equals_that_of_one_process(task: Task, world_size: int) -> None:
    torch.manual_seed(5)
    model = task.make_model()
    alone = task.evaluate(model, Shard())
    assert model.training  # left as it was
    shards = [task.evaluate(model, Shard(rank, world_size)) for rank in range(world_size)]
    assert torch.stack(shards).sum(dim=0).tolist() == alone.tolist()
    assert task.metrics(torch.stack(shards).sum(dim=0)) == task.metrics(alone)


def test_evaluation_is_right() -> None:
    """A model that always says 3 is right on the threes, and the shards are uneven: 445 samples over 2 and 3 ranks."""

    class AlwaysThree(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = torch.nn.Parameter(torch.eye(10)[3])

        def forward(self, images: Tensor) -> Tensor:
            assert not self.training
            return self.scores.expand(len(images), 10)

    digits = make_digits()
    labels = digits.test_labels
    assert len(labels) == 445
    for world_size in (1, 2, 3):
        sums = sum(digits.evaluate(AlwaysThree(), Shard(rank, world_size)) for rank in range(world_size))
        assert isinstance(sums, Tensor)
        assert sums.tolist() == [(labels == 3).sum().item(), 445]
        assert digits.metrics(sums)["accuracy"] == pytest.approx((labels == 3).sum().item() / 445)


def test_digits_split_is_fixed_and_disjoint_and_has_every_class() -> None:
    digits, again = make_digits(), make_digits()
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        assert torch.equal(getattr(digits, name), getattr(again, name))
    train, test = digits.train_images, digits.test_images
    assert (len(train), len(test)) == (1352, 445)
    rows = {tuple(image.flatten().tolist()) for image in train}
    assert not any(tuple(image.flatten().tolist()) in rows for image in test)
    assert digits.test_labels.bincount().min() >= 40


def test_digits_are_only_shifted() -> None:
    """Every augmented image is one of the nine shifts, by at most a pixel, of a training image with its label."""
    digits = make_digits()
    images, labels = next(iter(digits.batches(seed=0, epoch=0, shard=Shard(), batch_size=24)))
    padded = torch.nn.functional.pad(digits.train_images, (1, 1, 1, 1))
    shifted = [padded[:, :, row : row + 8, column : column + 8] for row in range(3) for column in range(3)]
    used = set()
    for image, label in zip(images, labels, strict=True):
        found = [
            (shift, sample)
            for shift, candidates in enumerate(shifted)
            for sample in torch.nonzero((candidates == image).flatten(1).all(dim=1)).flatten().tolist()
        ]
        assert any(digits.train_labels[sample] == label for _, sample in found)
        used.add(found[0][0])
    assert len(used) > 4


def test_batches_have_plain_strides(task: Task) -> None:
    """A size-1 channel that looked like channels-last gave gradients that DDP's buckets do not match, and it warned."""
    images = batches(task, Shard())[0][0]
    assert images.stride() == torch.empty(images.shape).stride()


def test_loss_falls_when_trained_on_one_batch(task: Task) -> None:
    torch.manual_seed(0)
    model = task.make_model()
    batch = batches(task, Shard(), batch_size=16)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_small_resnet_has_the_size_it_claims() -> None:
    assert sum(parameter.numel() for parameter in SmallResNet(1, 10).parameters()) == 297_450
    assert SmallResNet(3, 7, widths=(8, 16))(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


def trained(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_the_models_for_cifar_have_the_published_sizes() -> None:
    """The SIDCo paper's 14,982,987 is VGG-16 with eleven classes; see there for its number of ResNet-20."""
    assert trained(ResNet20()) == 269_722
    assert (trained(VGG16(10)), trained(VGG16(11))) == (14_982_474, 14_982_987)
    for model in (ResNet20(7, width=4), VGG16(7, width=8)):
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_an_unknown_task_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"task 'mnist' is unknown; choose from .*digits"):
        make_task("mnist")


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"needs scikit-learn .*pip install 'sidco_ddp\[train\]'"):
        make_task("digits")


def core_imports(source: str) -> list[str]:
    """What a module imports of `sidco_ddp` outside of `sidco_ddp.workloads`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides where it goes"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    inside = "sidco_ddp.workloads"
    return [name for name in found if f"{name}.".startswith("sidco_ddp.") and not f"{name}.".startswith(f"{inside}.")]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_workloads_import_nothing_of_the_core(path: Path) -> None:
    assert core_imports(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["import sidco_ddp", "import sidco_ddp.hook as h", "from sidco_ddp import attach", "from sidco_ddp.wire import x"],
)
def test_an_import_of_the_core_would_be_seen(line: str) -> None:
    assert core_imports(f"def f():\n    {line}\n")
