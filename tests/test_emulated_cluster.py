"""The emulated cluster: its links have the rate asked for, its processes find each other, and nothing of it remains."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, dry_run, environment, eventually, finish, marked, needs_namespaces, program, refusal, start

SCRIPT = "emulated-cluster.sh"
# All others send to rank 0 at the same time, and then it sends to all of them: its own link is the narrow place, once
# in each direction. It prints both rates. The clock is that of the machine, the same for all.
TRANSFER = """
import os, socket, sys, threading, time

TOTAL, CHUNK = int(sys.argv[1]) >> 16 << 16, 1 << 16


def send(peer):
    for _ in range(TOTAL // CHUNK):
        peer.sendall(bytes(CHUNK))


def receive(peer, found):
    got = first = len(peer.recv(CHUNK))
    started = time.perf_counter()
    while got < TOTAL:
        got += len(peer.recv(CHUNK))
    found.append((got - first, started, time.perf_counter()))


def on_all(task, *arguments):
    threads = [threading.Thread(target=task, args=(peer, *arguments)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rate(found):
    return sum(got for got, _, _ in found) * 8 / (max(end for _, _, end in found) - min(start for _, start, _ in found))


address, found = (os.environ["MASTER_ADDR"], 5000), []
others = int(os.environ["WORLD_SIZE"]) - 1
if os.environ["RANK"] == "0":
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(others)]
    for peer in peers:
        peer.sendall(b"!")
    on_all(receive, found)
    on_all(send)
    print(rate(found), rate([tuple(map(float, peer.recv(200).split())) for peer in peers]))
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    peer.recv(1)
    send(peer)
    receive(peer, found)
    peer.sendall(" ".join(map(str, found[0])).encode())
"""


def interfaces() -> set[str]:
    listed = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"^\d+: ([^:@]+)", listed, re.MULTILINE))


def namespaces(process: "subprocess.Popen[str]") -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if re.match(rf"sidco{process.pid}-", line)]


@pytest.fixture
def marker(request: pytest.FixtureRequest) -> Iterator[str]:
    """A line in the environment of all that a test starts; none of that may be left at its end."""
    before = interfaces()
    value = f"{os.getpid()}-{abs(hash(request.node.name))}"
    yield value
    assert marked(f"CLUSTER_TEST={value}") == []
    assert {name for name in interfaces() - before if re.match("port|bridge|sidco|eth0", name)} == set()


def cluster(marker: str, *arguments: str) -> "subprocess.Popen[str]":
    return start(SCRIPT, *arguments, env=environment(CLUSTER_TEST=marker, OMP_NUM_THREADS="1"))


@needs_namespaces
@pytest.mark.parametrize(
    ("rate", "mebibytes"), [("100mbit", 12), pytest.param("1gbit", 120, marks=pytest.mark.slow)], ids=["100M", "1G"]
)
def test_a_link_has_the_rate_asked_for_in_both_directions(
    tmp_path: Path, marker: str, rate: str, mebibytes: int
) -> None:
    transfer = program(tmp_path, "transfer.py", TRANSFER)
    process = cluster(marker, "3", rate, "--", sys.executable, str(transfer), str(mebibytes << 19))
    status, out, err = finish(process)
    assert status == 0, err
    asked = {"100mbit": 1e8, "1gbit": 1e9}[rate]
    for measured in map(float, out.split()):
        assert measured == pytest.approx(asked, rel=0.1)
    assert namespaces(process) == []


@needs_namespaces
def test_processes_on_one_host_talk_over_its_loopback(tmp_path: Path, marker: str) -> None:
    transfer = program(tmp_path, "transfer.py", TRANSFER)
    command = [sys.executable, str(transfer), str(8 << 20)]
    status, out, err = finish(cluster(marker, "1", "10mbit", "--ranks-per-host", "2", "--", *command))
    assert status == 0, err
    assert all(measured > 1e8 for measured in map(float, out.split())), "ten times the link's rate, at the least"


@needs_namespaces
def test_each_process_is_told_its_place_and_only_rank_0_writes_to_stdout(marker: str) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME"
    show = f'for name in {names}; do printf "%s " "${{!name}}"; done; ip -4 -o addr show eth0 | cut -d " " -f 7'
    status, out, err = finish(cluster(marker, "2", "1gbit", "--ranks-per-host", "2", "--", "bash", "-c", show))
    assert status == 0, err
    assert out == "0 4 0 2 0 eth0 =eth0 198.18.0.1/24\n"
    for rank, place in {1: "1 4 1 2 0", 2: "2 4 0 2 1", 3: "3 4 1 2 1"}.items():
        address = f"198.18.0.{rank // 2 + 1}/24"
        assert f"[rank {rank}] {place} eth0 =eth0 {address}\n" in err


@needs_namespaces
def test_two_clusters_at_once(tmp_path: Path) -> None:
    """Both have the same addresses, and neither sees the other."""
    transfer = program(tmp_path, "transfer.py", TRANSFER)
    command = ["2", "50mbit", "--", sys.executable, str(transfer), str(2 << 20)]
    runs = [start(SCRIPT, *command) for _ in range(2)]
    for run in runs:
        status, out, err = finish(run)
        assert status == 0, err
        assert all(2e7 < measured < 6e7 for measured in map(float, out.split()))
        assert namespaces(run) == []


@needs_namespaces
def test_the_first_failure_is_the_status_and_ends_the_others(marker: str) -> None:
    """The others linger, one in a session of its own and deaf to SIGTERM."""
    linger = "trap '' TERM; setsid sleep 200 & sleep 200"
    script = f'echo here; if [ "$RANK" = 1 ]; then sleep 1; exit 7; fi; {linger}'
    process = cluster(marker, "3", "1gbit", "--grace", "1", "--", "bash", "-c", script)
    status, out, err = finish(process)
    assert (status, out) == (7, "here\n")
    assert "rank 1 ended with status 7" in err
    assert namespaces(process) == []


@needs_namespaces
@pytest.mark.parametrize("case", ["ctrl-c", "terminate", "while building"])
def test_nothing_is_left_after_a_signal(tmp_path: Path, marker: str, case: str) -> None:
    script = f"touch {tmp_path}/up$RANK; (setsid sleep 200 & sleep 200)"
    hosts = {"while building": "60"}.get(case, "3")
    process = cluster(marker, hosts, "1gbit", "--grace", "2", "--", "bash", "-c", script)
    try:
        if case == "while building":
            eventually(lambda: len(namespaces(process)) > 3)
        else:
            eventually(lambda: len(list(tmp_path.glob("up*"))) == 3)
            assert len(namespaces(process)) == 4, "three hosts and a switch"
        if case == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
    finally:
        status, out, err = finish(process)
    assert (status, out) == (130 if case == "ctrl-c" else 143, ""), err
    assert namespaces(process) == []


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_multinode_trains_over_two_hosts(tmp_path: Path, marker: str) -> None:
    """One torchrun on each, which finds its interface by itself: the host's name leads to neither of them."""
    command = [*("env", "-u", "GLOO_SOCKET_IFNAME", "-u", "NCCL_SOCKET_IFNAME", str(ROOT / "launch" / "multinode.sh"))]
    options = ["--nnodes", "2", "--", "--steps", "2", "--batch-size", "8", "--quiet", "--log-dir", str(tmp_path)]
    status, out, err = finish(cluster(marker, "2", "1gbit", "--", *command, *options), 280)
    assert status == 0, err
    summary = json.loads(out)
    assert (summary["world_size"], summary["steps"]) == (2, 2)
    assert "[rank 1] multinode.sh: GLOO_SOCKET_IFNAME=eth0 (route to 198.18.0.1)" in err
    assert "multinode.sh: GLOO_SOCKET_IFNAME=eth0 (route to 198.18.0.1)" in err.replace("[rank 1] multinode.sh", "")


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_with_two_processes_on_each_of_two_hosts(tmp_path: Path, marker: str) -> None:
    options = ["--steps", "2", "--batch-size", "8", "--quiet", "--log-dir", str(tmp_path)]
    train = str(ROOT / "train.py")
    process = cluster(marker, "2", "1gbit", "--ranks-per-host", "2", "--torchrun", "--", train, *options)
    status, out, err = finish(process, 280)
    assert status == 0, err
    assert json.loads(out)["world_size"] == 4


def test_dry_run_needs_no_root() -> None:
    status, out, err = finish(start(SCRIPT, "2", "2.5gbit", "--dry-run", "--", "true", "a b"))
    assert status == 0, err
    assert out.count("ip netns add") == 3
    limits = [line for line in out.splitlines() if line.startswith("tc ")]
    assert len(limits) == 4
    assert all("tbf rate 2500000000bit burst 312500 limit " in line for line in limits)
    assert out.splitlines()[-1].endswith("WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 true a\\ b ")
    _, command, _ = dry_run(SCRIPT, "2", "1gbit", "--torchrun", "--dry-run", "--", str(ROOT / "train.py"), "--lr", "1")
    assert command[-5:] == ["--program", str(ROOT / "train.py"), "--", "--lr", "1"]


def test_without_root_the_remedy_is_named() -> None:
    options = {} if os.geteuid() else {"user": 65534, "cwd": "/"}
    try:
        message = refusal(SCRIPT, "2", "1gbit", "--", "true", **options)
    except PermissionError:
        pytest.skip("another user cannot read this folder")
    assert re.search(r"needs root .* run it with sudo -E, or as root in a container|install iproute2", message)


REFUSED = [
    ([], "0 arguments before -- where N and RATE are wanted; write emulated-cluster.sh 4 1gbit -- COMMAND"),
    (["2", "1gbit"], "no command; give it after --"),
    (["2", "1gbit", "--"], "no command; give it after --"),
    (["2", "--", "true"], "1 arguments before --"),
    (["0", "1gbit", "--", "true"], "N: '0' is not a number of hosts; give a whole number from 1 to 200"),
    (["-3", "1gbit", "--", "true"], "unknown option '-3'"),
    (["two", "1gbit", "--", "true"], "N: 'two' is not a number of hosts"),
    (["2", "1g", "--", "true"], "RATE: '1g' is not a rate; write 100mbit, 1gbit or 2.5gbit"),
    (["2", "1kbit", "--", "true"], "RATE: '1kbit' is too slow"),
    (["2", "1gbit", "--ranks-per-host", "0", "--", "true"], "option --ranks-per-host: '0' is not a whole number"),
    (["2", "1gbit", "--bogus", "--", "true"], "unknown option '--bogus'"),
    (["2", "1gbit", "--", "no-such-command"], "the command 'no-such-command' is neither on PATH nor a program"),
    (["2", "1gbit", "--torchrun", "--", "no.py"], "option --program: there is no file 'no.py'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    assert message in refusal(SCRIPT, *arguments)
