"""Real processes for tests: a world is spawned once a size and then runs many checks.

A check is a module-level function ``check(rank, world_size, **arguments)``; it runs on every rank, in the same Gloo
group, and what it raises on any rank fails the test with that rank's traceback.
"""

import contextlib
import os
import socket
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60  # seconds, of the group and of every check


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _serve(rank, world_size, port, timeout, inbox, outbox):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=timedelta(seconds=TIMEOUT))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    while (job := inbox.get()) is not None:
        check, arguments = job
        torch.manual_seed(1234)  # equal on all ranks; checks that want different data add the rank
        try:
            outbox.put((rank, None, check(rank, world_size, **arguments)))
        except BaseException:
            outbox.put((rank, traceback.format_exc(), None))
    dist.destroy_process_group()


class World:
    """``world_size`` processes that share a Gloo group; ``timeout`` is the group's, in seconds."""

    def __init__(self, world_size, timeout=TIMEOUT):
        context = mp.get_context("spawn")
        self.size = world_size
        self._broken = False
        self._inboxes = [context.SimpleQueue() for _ in range(world_size)]
        self._outbox = context.Queue()
        port = free_port()
        self._processes = [
            context.Process(target=_serve, args=(rank, world_size, port, timeout, inbox, self._outbox), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self._processes:
            process.start()

    def run(self, check, **arguments):
        """Results of ``check`` by rank; fails with the tracebacks of all ranks that raised."""
        self._broken = True  # until all ranks have answered: a test that times out leaves answers behind
        for inbox in self._inboxes:
            inbox.put((check, arguments))
        results, failures = [None] * self.size, []
        for _ in range(self.size):
            try:
                rank, failure, result = self._outbox.get(timeout=TIMEOUT + 20)
            except Exception:
                codes = [process.exitcode for process in self._processes]
                self.close()
                raise AssertionError(f"no answer from some rank; exit codes {codes}") from None
            results[rank] = result
            if failure:
                failures.append(f"--- rank {rank} of {self.size}\n{failure}")
        self._broken = any(word in failure for failure in failures for word in ("imed out", "timeout", "closed by"))
        if failures:
            raise AssertionError("\n".join(failures))
        return results

    @property
    def alive(self):
        """Whether it can run more checks: its processes live, and no connection between them is broken."""
        return not self._broken and all(process.is_alive() for process in self._processes)

    def close(self):
        for inbox in self._inboxes:
            with contextlib.suppress(OSError):
                inbox.put(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
