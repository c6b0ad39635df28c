"""A contender in a process of its own, where nothing that ours sets for its process helps it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import ray

ENDING_S = 20.0

Iterate = Callable[[], int]


def apart(build: Callable[..., Iterate], config: Any, num_envs: int, stack: ExitStack) -> Iterate:
    """Build a contender in another process, on the same Ray; return what runs an iteration there.

    Args:
        build: a function of a module, so that the other process finds it.
        stack: gets what ends the process.
    """
    if not ray.is_initialized():
        ray.init()
    address = ray.get_runtime_context().gcs_address
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, address, build, config, num_envs), daemon=True
    )
    process.start()
    theirs.close()  # so that its end shows here as the end of what it says

    def end() -> None:
        ours.close()
        process.join(ENDING_S)
        if process.is_alive():
            process.terminate()
            process.join()

    stack.callback(end)

    def iterate() -> int:
        ours.send(None)
        return int(ours.recv())

    ours.recv()  # it is built
    return iterate


def _serve(
    pipe: Connection, address: str, build: Callable[..., Iterate], config: Any, num_envs: int
) -> None:
    ray.init(address=address, log_to_driver=False)
    with ExitStack() as stack:
        iterate = build(config, num_envs, stack)
        pipe.send(0)
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            pipe.send(iterate())
