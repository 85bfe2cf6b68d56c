"""Every task from its command line to its summary, on two processes, with real data and with invented data."""

import os
from pathlib import Path

import pytest
from trainruns import TORCHRUN, finish, start, strict

from sidco_ddp.workloads import TASKS

FEW = {"ptb-lstm": "10", "an4-lstm": "12"}  # test samples, where all of them take long
FOLDERS = {
    "cifar10-resnet20": "cifar10",
    "cifar10-vgg16": "cifar10",
    "imagenet-resnet50": "imagenette128",
    "imagenet-vgg19": "imagenette128",
    "ptb-lstm": "ptb",
    "an4-lstm": "an4",
}
PARAMETERS = {"none": 1.0, "topk": 0.01, "sidco-e": 0.01}


def data_options(task: str, kind: str) -> list[str]:
    if kind == "synthetic":
        return ["--synthetic"]
    root = os.environ.get("SIDCO_DATA", "")
    folder = Path(root) / FOLDERS[task]
    if not root or not folder.exists():
        pytest.skip(f"needs {FOLDERS[task]}/ in the folder that the variable SIDCO_DATA names")
    # a set of images is named by its own folder, the others by the one above
    return ["--data-dir", str(folder if task.startswith("imagenet") else root)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["synthetic", "real"])
@pytest.mark.parametrize("task", FOLDERS)
def test_a_task_trains_on_two_processes(tmp_path: Path, task: str, kind: str) -> None:
    data = data_options(task, kind)
    settings = ["--set", f"test_samples={FEW.get(task, '40')}", "--batch-size", "4"]
    for compressor, sent in PARAMETERS.items():
        options = ["--task", task, "--scale", "small", "--steps", "3", "--log-dir", str(tmp_path), "--quiet"]
        exchange = ["--compressor", compressor, "--ratio", "0.01", "--check-replicas", "1"]
        status, out, err = finish(start(*options, *data, *settings, *exchange, launcher=TORCHRUN), timeout=100)
        assert status == 0, err
        assert "Warning" not in err, err
        summary = strict(out)
        assert (summary["task"], summary["compressor"], summary["steps"]) == (task, compressor, 3)
        assert summary["metric"] is not None
        share = summary["bytes_sent_per_step"] / summary["dense_bytes_per_step"]
        assert share == 1.0 if sent == 1.0 else share < 4 * sent


def test_every_task_but_the_default_is_tried() -> None:
    assert {*FOLDERS, "digits"} == set(TASKS)
