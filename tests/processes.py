"""Runs functions in fresh process groups, forked from a server that has imported the heavy libraries once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

TIMEOUT_SECONDS = 420
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])


def run_in_processes(function: Callable, world_size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` in `world_size` processes with torchrun's environment; results in rank order.

    Raises:
        AssertionError: with the traceback of the first process that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=_call, args=(sender, function, args, rank, world_size, port))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    outcomes = []
    try:
        for rank, receiver in enumerate(pipes):
            assert receiver.poll(TIMEOUT_SECONDS), f"rank {rank} did not answer in {TIMEOUT_SECONDS} s"
            try:
                outcomes.append(receiver.recv())
            except EOFError:
                outcomes.append((False, f"rank {rank} died with exit code {processes[rank].exitcode}"))
            if not outcomes[-1][0]:
                break
    finally:
        for process in processes:
            process.join(1 if outcomes and not outcomes[-1][0] else 30)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [result for succeeded, result in outcomes if not succeeded]
    assert not failures, failures[0]
    return [result for _, result in outcomes]


def _call(sender, function: Callable, args: tuple, rank: int, world_size: int, port: int) -> None:
    import torch

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    try:
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send(outcome)
    sender.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not outcome[0]:
        raise SystemExit(1)
