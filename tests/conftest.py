"""Fixtures shared by all tests."""

import signal

import pytest
import torch
from world import World

# A shell's background, and nohup, have some signals ignored, and all that is started inherits that.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

torch.set_num_threads(1)  # the tests start processes of their own; more threads than cores only wait for each other


def pytest_report_header():
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, cuda {torch.cuda.is_available()}"


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def worlds():
    """``worlds(n)``: a running world of n processes, started on first use and kept."""
    running = {}

    def get(size):
        if size in running and not running[size].alive:
            running.pop(size).close()
        if size not in running:
            running[size] = World(size)
        return running[size]

    yield get
    for world in running.values():
        world.close()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
