"""What the tests of the launch scripts share."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch"
OTHERS = re.compile(r"^(SLURM_|PET_|OMP_|GLOO_|NCCL_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|GROUP_|TORCHELASTIC_)")


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """This process's, without what a launcher looks at; programs in `folders` come before all others."""
    clean = {name: value for name, value in os.environ.items() if not OTHERS.match(name)}
    path = os.pathsep.join([*map(str, folders), str(Path(sys.executable).parent), clean["PATH"]])
    return {**clean, "PATH": path, "PYTHONPATH": str(ROOT), **variables}


def start(script: str, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """One of the scripts, in a process group of its own as at a terminal."""
    defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    return subprocess.Popen([str(LAUNCH / script), *arguments], start_new_session=True, **{**defaults, **options})


def finish(process: "subprocess.Popen[str]", timeout: float = 100) -> tuple[int, str, str]:
    """Status, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def refusal(script: str, *arguments: str, **options: Any) -> str:
    """The last line on stderr of a script that must leave with status 2 before it starts anything."""
    status, out, err = finish(start(script, *arguments, **options), timeout=60)
    assert (status, out) == (2, ""), err
    last = err.splitlines()[-1]
    assert last.startswith(f"{script}: error: ")
    assert err.count(": error: ") == 1
    return last


def dry_run(script: str, *arguments: str, **options: Any) -> tuple[dict[str, str], list[str], str]:
    """Variables and command of the last line that a dry run prints, and stderr."""
    status, out, err = finish(start(script, *arguments, **options), timeout=60)
    assert status == 0, err
    words = shlex.split(out.splitlines()[-1])
    variables = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words, err


def program(folder: Path, name: str, text: str) -> Path:
    """A program of this name and text in `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def eventually(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """What `condition` returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)
    return found


def marked(marker: str) -> list[int]:
    """Processes that have `marker` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # gone, or not ours
            pass
    return found


def why_no_namespaces() -> str:
    """Why network namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs iproute2"
    name = f"sidcoprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


WITHOUT = why_no_namespaces()
needs_namespaces = pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT or "-")
