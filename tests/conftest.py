"""Fixtures shared by all tests."""

import pytest
import torch
from world import World

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
