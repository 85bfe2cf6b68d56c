"""The launch scripts: what they choose, that they train, and how they say no."""

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import LAUNCH, ROOT, dry_run, environment, eventually, finish, marked, program, refusal, start

STEPS = ("--steps", "2", "--batch-size", "8", "--quiet")
# Two interfaces: 10.1.0.0/16 by ib0, where 10.1.0.2 is this machine, and all else by eth0.
IP = """#!/bin/sh
case "$*" in
    *"route get 10.1.0.2") echo "local 10.1.0.2 dev lo src 10.1.0.2 uid 0 \\\\    cache <local>" ;;
    *"route get 10.1."*) echo "10.1.0.9 dev ib0 src 10.1.0.2 uid 0 \\\\    cache" ;;
    *"route get 127.0.0.1") echo "local 127.0.0.1 dev lo src 127.0.0.1 uid 0" ;;
    *"route get 203."*) echo "RTNETLINK answers: Network is unreachable" >&2; exit 2 ;;
    *"route get "*) echo "192.0.2.7 via 192.0.2.1 dev eth0 src 192.0.2.2 uid 0 \\\\    cache" ;;
    *"addr show to 10.1.0.2") echo "3: ib0    inet 10.1.0.2/16 brd 10.1.255.255 scope global ib0" ;;
    *"link show lo") echo "1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN" ;;
esac
"""
NPROC = "#!/bin/sh\necho 12\n"
SCONTROL = """#!/bin/sh
[ "$1 $2 $3" = "show hostnames nd[07-09]" ] || exit 1
printf 'nd07\\nnd08\\nnd09\\n'
"""


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder with programs that answer as a machine with two interfaces and twelve cores would."""
    folder = tmp_path / "fakes"
    for name, text in {"ip": IP, "nproc": NPROC, "nvidia-smi": "#!/bin/sh\nexit 9\n"}.items():
        program(folder, name, text)
    return folder


def after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


# ---- what is chosen


def test_local_takes_the_loopback_a_free_port_and_its_share_of_the_cores(fakes: Path) -> None:
    variables, command, err = dry_run(
        "local.sh", "--nproc-per-node", "3", "--dry-run", "--", "--steps", "a b", env=environment(fakes)
    )
    chosen = {"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert variables == {**chosen, "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}
    assert command[:2] == ["torchrun", "--standalone"]
    assert after(command, "--nproc-per-node") == "3"
    assert command[-3:] == [str(ROOT / "train.py"), "--steps", "a b"]
    assert "OMP_NUM_THREADS=4 (12 cores available / 3 process(es))" in err
    assert "GLOO_SOCKET_IFNAME=lo (route to 127.0.0.1)" in err
    assert "a free port" in err


def test_one_process_for_each_gpu(fakes: Path) -> None:
    assert after(dry_run("local.sh", "--dry-run", env=environment(fakes))[1], "--nproc-per-node") == "2"
    program(fakes, "nvidia-smi", "#!/bin/sh\nprintf 'GPU 0: X (UUID: 1)\\nGPU 1: X\\nGPU 2: X\\n'\n")
    assert after(dry_run("local.sh", "--dry-run", env=environment(fakes))[1], "--nproc-per-node") == "3"


def test_flags_of_torchrun(fakes: Path) -> None:
    flags = ["--max-restarts=3", "--torchrun=--monitor-interval=1", "--torchrun", "--tee=3", "--program", __file__]
    _, command, _ = dry_run("local.sh", *flags, "--dry-run", env=environment(fakes))
    assert after(command, "--max-restarts") == "3"
    assert command[-3:] == ["--monitor-interval=1", "--tee=3", __file__]


@pytest.mark.parametrize(
    ("master", "interface", "here"),
    [("10.1.0.9", "ib0", False), ("10.1.0.2", "ib0", True), ("192.0.2.7", "eth0", False)],
)
def test_multinode_takes_the_interface_on_the_way_to_the_master(
    fakes: Path, master: str, interface: str, here: bool
) -> None:
    """On the master itself that way is the loopback, which nobody else comes by."""
    options = ["--nnodes", "2", "--master", master, "--job-id", "4711", "--dry-run"]
    variables, command, err = dry_run("multinode.sh", *options, "--", "--ratio", "0.01", env=environment(fakes))
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == (interface, f"={interface}")
    assert variables["OMP_NUM_THREADS"] == "12"
    assert after(command, "--rdzv-endpoint") == f"{master}:19711"
    assert after(command, "--rdzv-backend") == "c10d"
    assert after(command, "--rdzv-id") == "4711"
    assert after(command, "--rdzv-conf") == f"is_host={str(here).lower()}"
    assert after(command, "--local-addr") == ("192.0.2.2" if interface == "eth0" else "10.1.0.2")
    assert "--node-rank" not in command
    assert command[-3:] == [str(ROOT / "train.py"), "--ratio", "0.01"]
    assert f"GLOO_SOCKET_IFNAME={interface} (route to {master})" in err
    assert f"meeting at {master}:19711 (from job '4711')" in err


def test_jobs_have_ports_of_their_own(fakes: Path) -> None:
    ports = []
    for job in ("41", "42", "night", "day", "999999999999999"):
        options = ["--nnodes", "2", "--master", "10.1.0.9", "--job-id", job, "--dry-run"]
        ports.append(int(after(dry_run("multinode.sh", *options, env=environment(fakes))[1], "--rdzv-endpoint")[9:]))
    assert len(set(ports)) == 5
    assert all(15000 <= port < 25000 for port in ports)
    again = dry_run("multinode.sh", *options, env=environment(fakes, MASTER_PORT="1234"))
    assert after(again[1], "--rdzv-endpoint") == "10.1.0.9:1234"
    assert "(MASTER_PORT)" in again[2]
    again = dry_run("multinode.sh", *options, "--port", "77", env=environment(fakes, MASTER_PORT="1234"))
    assert after(again[1], "--rdzv-endpoint") == "10.1.0.9:77"


@pytest.mark.parametrize("script", ["local.sh", "multinode.sh"])
def test_what_the_user_has_set_stays(fakes: Path, script: str) -> None:
    mine = {"OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "mine0", "NCCL_SOCKET_IFNAME": "^docker"}
    mine |= {"PET_SIGNALS_TO_HANDLE": "SIGTERM"}
    cluster = {"MASTER_ADDR": "10.1.0.9", "MASTER_PORT": "4242", "SLURM_CPUS_PER_TASK": "8"}
    options = ["--nnodes", "2"] if script == "multinode.sh" else []
    variables, command, err = dry_run(script, *options, "--dry-run", env=environment(fakes, **mine, **cluster))
    assert variables == mine
    for name, value in mine.items():
        assert f"{name}={value} (as you set it)" in err
    if options:
        assert after(command, "--rdzv-endpoint") == "10.1.0.9:4242"


@pytest.mark.parametrize(("processes", "threads"), [("2", "4"), ("3", "2"), ("9", "1")])
def test_slurm_says_how_many_cores_there_are(fakes: Path, processes: str, threads: str) -> None:
    variables, _, err = dry_run(
        "local.sh", "--nproc-per-node", processes, "--dry-run", env=environment(fakes, SLURM_CPUS_PER_TASK="8")
    )
    assert variables["OMP_NUM_THREADS"] == threads
    assert f"OMP_NUM_THREADS={threads} (8 cores by SLURM_CPUS_PER_TASK / {processes} process(es))" in err


def test_without_the_ip_command_no_interface_is_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    for name in ("bash", "dirname", "grep", "env", "nproc", "getent", "torchrun"):
        found = shutil.which(name, path=environment()["PATH"])
        assert found, name
        (folder / name).symlink_to(found)
    for script, options in (("local.sh", []), ("multinode.sh", ["--nnodes=2", "--master=10.1.0.9", "--port=5"])):
        variables, command, err = dry_run(script, *options, "--dry-run", env={"PATH": str(folder)})
        assert list(variables) == ["OMP_NUM_THREADS", "PET_SIGNALS_TO_HANDLE"]
        assert "no ip command here (package iproute2): the interface is left to Gloo and NCCL; set GLOO" in err
        assert "--rdzv-conf" not in command


# ---- SLURM


def test_slurm_meets_at_the_first_node_of_the_job(fakes: Path) -> None:
    program(fakes, "scontrol", SCONTROL)
    program(fakes, "srun", "#!/bin/sh\n")
    variables = {
        **{"SLURM_JOB_NODELIST": "nd[07-09]", "SLURM_NNODES": "3", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"},
        **{"SLURM_NODEID": "1", "SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "8", "SLURM_SUBMIT_DIR": str(ROOT)},
    }
    arguments = ["--nproc-per-node", "2", "--dry-run", "--", "--ratio", "0.01"]
    process = start("slurm.sbatch", *arguments, env=environment(fakes, **variables))
    status, out, err = finish(process)
    assert status == 0, err
    step, node = out.splitlines()
    assert step.startswith("srun --nodes 3 --ntasks 3 --ntasks-per-node 1 --kill-on-bad-exit=1 --cpus-per-task 8 bash ")
    assert "multinode.sh --nnodes 3 --master nd07 --job-id 4711 --nproc-per-node 2 --dry-run -- --ratio 0.01" in step
    assert "10.0.0.1" not in out + err
    assert node.startswith("OMP_NUM_THREADS=4 ")
    assert "--rdzv-endpoint nd07:19711 --rdzv-id 4711" in node
    assert "3 node(s), meeting at nd07, the first of nd[07-09]" in err


def test_slurm_runs_a_copy_of_the_script(fakes: Path, tmp_path: Path) -> None:
    program(fakes, "scontrol", SCONTROL)
    program(fakes, "srun", '#!/bin/sh\nprintf "%s " "$@"\n')
    copy = program(tmp_path / "spool", "slurm_script", (LAUNCH / "slurm.sbatch").read_text())
    for submitted_from, status in ((str(ROOT), 0), (str(tmp_path), 2)):
        variables = {"SLURM_JOB_NODELIST": "nd[07-09]", "SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": submitted_from}
        done = subprocess.run(
            [copy, "--", "--lr", "1"], env=environment(fakes, **variables), capture_output=True, text=True
        )
        assert done.returncode == status
        if status:
            assert "there is no launch/common.sh in" in done.stderr
            assert "submit from the root of the repository" in done.stderr
        else:
            assert f"bash {LAUNCH}/multinode.sh --nnodes 3 --master nd07 --job-id 4711 -- --lr 1" in done.stdout


# ---- refusals

REFUSED = [
    (
        "local.sh",
        ["--bogus"],
        "unknown option '--bogus'; local.sh --help lists the options, those of train.py come after --",
    ),
    ("local.sh", ["--steps", "3"], "unknown option '--steps'"),
    ("local.sh", ["train.py"], "unexpected argument 'train.py'; what train.py is to get comes after --"),
    (
        "local.sh",
        ["--nproc-per-node", "0"],
        "option --nproc-per-node: '0' is not a whole number; give one of at least 1",
    ),
    ("local.sh", ["--nproc-per-node=two"], "option --nproc-per-node: 'two' is not"),
    ("local.sh", ["--nproc-per-node"], "option --nproc-per-node needs a value"),
    ("local.sh", ["--max-restarts", "-1"], "option --max-restarts: '-1' is not a whole number; give one of at least 0"),
    (
        "local.sh",
        ["--torchrun", "x"],
        "option --torchrun: 'x' is not a flag of torchrun; write --torchrun=--flag=value",
    ),
    ("local.sh", ["--program", "no.py"], "option --program: there is no file 'no.py'; name the training script"),
    ("multinode.sh", [], "option --nnodes is missing; give the number of machines"),
    (
        "multinode.sh",
        ["--nnodes", "0"],
        "option --nnodes: '0' is not a number of machines; give a whole number of at least 1",
    ),
    (
        "multinode.sh",
        ["--nnodes=2"],
        "option --master is missing and MASTER_ADDR is not set; name the machine to meet at",
    ),
    ("multinode.sh", ["--nnodes=2", "--master=10.1.0.9"], "no port: give --port N or --job-id ID"),
    ("multinode.sh", ["--nnodes=2", "--master=10.1.0.9", "--port=70000"], "option --port: '70000' is not a port"),
    (
        "multinode.sh",
        ["--nnodes=2", "--master=203.0.113.1", "--port=5"],
        "no route to the master '203.0.113.1' (ip route",
    ),
    (
        "multinode.sh",
        ["--nnodes=2", "--master=localhost", "--port=5"],
        "the master 'localhost' is the loopback address 127.0.0.1 on this machine, where no other machine can meet it; "
        "give --master the address of its network interface",
    ),
    (
        "multinode.sh",
        ["--nnodes=2", "--master=no-such-host.invalid", "--port=5", "--wait=1"],
        "the master 'no-such-host.invalid' cannot be resolved on this machine; give --master its address, or add it",
    ),
    ("slurm.sbatch", [], "SLURM_JOB_NODELIST is not set; start this with sbatch, or within salloc"),
]


@pytest.mark.parametrize(("script", "arguments", "message"), REFUSED, ids=[" ".join([a, *b]) for a, b, _ in REFUSED])
def test_bad_input_is_refused_in_one_line(fakes: Path, script: str, arguments: list[str], message: str) -> None:
    assert message in refusal(script, *arguments, env=environment(fakes))


def test_no_torchrun(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    message = "torchrun is not on PATH; activate the environment that PyTorch is installed in"
    assert message in refusal("local.sh", env={"PATH": str(tmp_path)})


def test_a_loopback_that_is_down(fakes: Path) -> None:
    program(fakes, "ip", IP.replace("<LOOPBACK,UP,LOWER_UP>", "<LOOPBACK>"))
    message = "the loopback interface is down; bring it up: ip link set lo up"
    assert message in refusal("local.sh", env=environment(fakes))


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"option --port: port {port} of 127.0.0.1 is taken; give another --port or --job-id on all machines"
        if not shutil.which("ip"):
            pytest.skip("without ip it is not known whether the master is here")
        assert message in refusal("multinode.sh", "--nnodes=1", "--master=127.0.0.1", f"--port={port}")


@pytest.mark.parametrize("script", ["local.sh", "multinode.sh", "emulated-cluster.sh"])
def test_help(script: str) -> None:
    status, out, err = finish(start(script, "--help"))
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: {script} ")
    assert "--dry-run" in out


# ---- runs


def test_local_trains(tmp_path: Path) -> None:
    run = start("local.sh", "--", *STEPS, "--log-dir", str(tmp_path), env=environment(OMP_NUM_THREADS="1"))
    status, out, err = finish(run)
    assert status == 0, err
    summary = json.loads(out)  # nothing else is on stdout
    assert (summary["task"], summary["world_size"], summary["steps"]) == ("digits", 2, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_that_start_at_the_same_moment_both_train(tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("a", "b")]
    runs = [
        start("local.sh", "--", *STEPS, "--log-dir", str(log), env=environment(OMP_NUM_THREADS="1")) for log in logs
    ]
    for status, out, err in [finish(run, 140) for run in runs]:
        assert status == 0, err
        summary = json.loads(out)  # nothing else is on stdout
        assert (summary["task"], summary["world_size"], summary["steps"]) == ("digits", 2, 2)


def test_status_and_restarts_are_torchruns(tmp_path: Path) -> None:
    """A program that fails once is run again; one that fails for good makes the script fail."""
    flag = tmp_path / "was-here"
    once = program(tmp_path, "once.py", f"import pathlib\np = pathlib.Path({str(flag)!r})\nif not p.exists():\n")
    once.write_text(once.read_text() + "    p.touch()\n    raise SystemExit(3)\nprint('second')\n")
    options = ["--nproc-per-node=1", f"--program={once}", "--torchrun=--monitor-interval=0.1"]
    status, out, err = finish(start("local.sh", *options, "--max-restarts=1"))
    assert (status, out) == (0, "second\n"), err
    flag.unlink()
    status, out, err = finish(start("local.sh", *options))
    assert status != 0
    assert "exitcode  : 3" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_script_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    marker = f"LAUNCH_TEST={os.getpid()}-{number}"
    waiting = program(tmp_path, "wait.py", "import time, pathlib, os\n")
    waiting.write_text(
        waiting.read_text() + f"pathlib.Path({str(tmp_path)!r}, 'up' + os.environ['RANK']).touch()\ntime.sleep(99)\n"
    )
    name, value = marker.split("=")
    process = start("local.sh", f"--program={waiting}", env=environment(**{name: value}))
    try:
        eventually(lambda: len(list(tmp_path.glob("up*"))) == 2)
        assert len(marked(marker)) >= 3
        process.send_signal(number)
    finally:
        status, _, err = finish(process, timeout=60)
    assert status != 0, err
    eventually(lambda: not marked(marker), 20)


# ---- Kubernetes

POD = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["containers", "volumes"],
            "additionalProperties": False,
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["name", "image", "command", "args", "ports", "resources", "volumeMounts"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"const": "pytorch"},  # the operator's name for the container that trains
                            "image": {"type": "string"},
                            "workingDir": {"type": "string", "pattern": "^/"},
                            "command": {"type": "array", "items": {"type": "string"}},
                            "args": {"type": "array", "items": {"type": "string"}},
                            "ports": {
                                "type": "array",
                                "minItems": 1,
                                "items": {
                                    "type": "object",
                                    "required": ["name", "containerPort"],
                                    "additionalProperties": False,
                                    "properties": {
                                        "name": {"type": "string", "pattern": "^[a-z0-9-]{1,15}$"},
                                        "containerPort": {"type": "integer", "minimum": 1, "maximum": 65535},
                                    },
                                },
                            },
                            "resources": {
                                "type": "object",
                                "required": ["requests", "limits"],
                                "additionalProperties": False,
                                "properties": {
                                    kind: {
                                        "type": "object",
                                        "required": ["cpu", "memory"],
                                        "additionalProperties": {"type": ["string", "integer"]},
                                    }
                                    for kind in ("requests", "limits")
                                },
                            },
                            "volumeMounts": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["name", "mountPath"],
                                    "additionalProperties": False,
                                    "properties": {"name": {"type": "string"}, "mountPath": {"type": "string"}},
                                },
                            },
                        },
                    },
                },
                "volumes": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "emptyDir"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"},
                            "emptyDir": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {"medium": {"enum": ["", "Memory"]}, "sizeLimit": {"type": "string"}},
                            },
                        },
                    },
                },
            },
        },
    },
}
REPLICAS = {
    "type": "object",
    "required": ["replicas", "restartPolicy", "template"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": POD,
    },
}
PYTORCH_JOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["pytorchReplicaSpecs", "runPolicy"],
            "additionalProperties": False,
            "properties": {
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                        "backoffLimit": {"type": "integer"},
                        "activeDeadlineSeconds": {"type": "integer"},
                        "ttlSecondsAfterFinished": {"type": "integer"},
                    },
                },
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "required": ["Master", "Worker"],
                    "additionalProperties": False,
                    "properties": {
                        "Master": {**REPLICAS, "properties": {**REPLICAS["properties"], "replicas": {"const": 1}}},  # type: ignore[dict-item]
                        "Worker": REPLICAS,
                    },
                },
            },
        },
    },
}
MANIFESTS = sorted((LAUNCH / "kubernetes").glob("*.yaml"))


def manifest(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text())


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_is_a_pytorch_job(path: Path) -> None:
    """Against the fields of the kubeflow.org/v1 API that are in use; any other field is an error."""
    pytest.importorskip("jsonschema").Draft202012Validator(PYTORCH_JOB).validate(manifest(path))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_fits_together(path: Path, fakes: Path) -> None:
    job = manifest(path)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    for spec in replicas.values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        (volume,) = [v["name"] for v in pod["volumes"] if v["emptyDir"].get("medium") == "Memory"]
        assert {"name": volume, "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert [port["name"] for port in container["ports"]] == ["pytorchjob-port"]
        assert container["resources"]["requests"] == container["resources"]["limits"], "so that no neighbour slows it"
        args = container["args"]
        assert after(args, "--nnodes") == str(sum(spec["replicas"] for spec in replicas.values()))
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        assert after(args, "--nproc-per-node") == (gpus or "1")
        # What the pod runs is what multinode.sh understands, with what the operator sets.
        assert container["command"] == ["bash", "launch/multinode.sh"]
        operator = {"MASTER_ADDR": "10.1.0.9", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}
        _, command, _ = dry_run("multinode.sh", "--dry-run", *args, env=environment(fakes, **operator))
        assert after(command, "--rdzv-endpoint") == "10.1.0.9:23456"
    assert len(MANIFESTS) == 2


# ---- the scripts as text


def test_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck", path=environment()["PATH"])
    if not shellcheck:
        pytest.skip("shellcheck is not installed")
    scripts = [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / ".ci" / "run"]
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_script_is_strict_and_executable() -> None:
    for path in [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"]:
        if path.name == "common.sh":
            continue
        assert "set -euo pipefail\n" in path.read_text()
        assert os.access(path, os.X_OK), path
