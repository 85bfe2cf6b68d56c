"""The cut of the package: each module imports only from rows above its own, and few modules may touch the network."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sidco_ddp"
ROWS = [
    {"indexing"},
    {"distributions", "layout", "options", "owner", "stats", "checkpoint", "redistribute", "workloads", "kernels"},
    {"search", "payload", "target"},
    {"threshold"},
    {"compressors", "feedback", "wire", "transport"},
    {"binding", "agreement"},
    {"slots"},
    {"call"},
    {"steps"},
    {"state"},
    {"hook"},
    {"__init__"},
    {"training"},
    {"tools"},
]
ROW = {module: row for row, modules in enumerate(ROWS) for module in modules}
COLLECTIVES = {"all_gather", "all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv"}
COLLECTIVES |= {"all_gather_single", "all_gather_into_tensor", "all_to_all", "reduce_scatter", "all_gather_object"}


def module_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(tree):
    """Modules of the package that a file imports, by first name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "relative"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sidco_ddp":
            names = node.module.split(".")[1:]
            yield from [names[0]] if names else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "sidco_ddp":
                    yield [*alias.name.split("."), "__init__"][1]


def upward_imports(module, tree):
    """Imports that do not come from a row above; names of the public face count as the face itself."""
    for name in imports_of(tree):
        target = name if name in ROW else "__init__"
        if target != module and ROW[target] >= ROW[module]:
            yield name


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upwards(path):
    module = module_of(path)
    assert module in ROW, f"{module} has no row: add it to ROWS where it belongs"
    assert not list(upward_imports(module, ast.parse(path.read_text())))


def test_an_upward_import_is_found():
    tree = ast.parse("from sidco_ddp.state import SIDCoState\nfrom sidco_ddp import transport\nimport sidco_ddp.hook")
    assert list(upward_imports("feedback", tree)) == ["state", "transport", "hook"]


def test_workloads_do_not_know_the_core():
    for path in (PACKAGE / "workloads").rglob("*.py"):
        assert set(imports_of(ast.parse(path.read_text()))) <= {"workloads"}, path


def test_only_transport_calls_collectives():
    for path in PACKAGE.rglob("*.py"):
        if module_of(path) in {"transport", "training", "tools"}:  # which reduce metrics, after the step
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
                assert isinstance(node.value, ast.Name), path
                assert node.value.id == "transport", f"{path}: {ast.unparse(node)}"


def test_hook_fits_on_a_screen_and_keeps_its_annotations():
    source = (PACKAGE / "hook.py").read_text()
    tree = ast.parse(source)
    (hook,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "sidco_hook"]
    assert hook.end_lineno - hook.lineno < 30
    assert "from __future__ import annotations" not in source, "DDP compares the hook's annotations by identity"


def test_import_needs_torch_and_numpy_alone():
    """And touches no device and no process group."""
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        top = name.split('.')[0]\n"
        "        if top in {'torchvision', 'sklearn', 'tqdm', 'tensorboard', 'numba', 'matplotlib', 'scipy'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import sidco_ddp, torch\n"
        "state = sidco_ddp.SIDCoState(compressor='sidco-e', ratio=0.01)\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert not any(name.startswith('sidco_ddp.workloads') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=100, cwd=PACKAGE.parent)
