"""Threads are on the card that they bring weights to, and no interrupt leaves them locked."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
from types import FrameType

import pytest
import torch

from airtune.weights.workers import Workers

CPU = torch.device("cpu")


def test_the_current_device_is_the_one_they_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    for device in (torch.device("cuda", 1), CPU):
        pool = Workers(1, "test", device)
        assert pool.submit(int).result() == 0
        pool.shutdown()
    assert chosen == [torch.device("cuda", 1)]


def test_work_is_done_in_its_order_and_before_the_end() -> None:
    pool, done = Workers(1, "test", CPU), []
    for i in range(3):
        task = pool.submit(lambda i=i: (time.sleep(0.01), done.append(i)))
    pool.shutdown()
    assert done == [0, 1, 2] and task.result() == (None, None)
    with pytest.raises(RuntimeError, match="threads of this pool have ended"):
        pool.submit(int)


def test_an_error_is_raised_where_the_result_is_wanted_and_holds_nothing() -> None:
    class Held:
        pass

    pool = Workers(1, "test", CPU)
    held = Held()
    gone, task = weakref.ref(held), pool.submit(lambda held: 1 / 0, held)
    gc.disable()
    try:
        for _ in range(2):
            try:
                task.result()
            except ZeroDivisionError:
                continue
            pytest.fail("no error")
        assert pool.submit(int).result() == 0, "the thread goes on"
        del held, task
        assert gone() is None
    finally:
        gc.enable()
        pool.shutdown()


def test_an_interrupt_locks_nothing() -> None:
    """Before any instruction of the Python code that gives a thread work and waits for it."""
    pool, at, count = Workers(1, "test", CPU), 0, 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        frame.f_trace_opcodes = True
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return trace

    while count == at:
        at, count = at + 1, 0
        with contextlib.suppress(KeyboardInterrupt):
            try:
                sys.settrace(trace)
                pool.submit(int).result()
            finally:
                sys.settrace(None)
        later = threading.Thread(target=lambda: pool.submit(int).result(), daemon=True)
        later.start()
        later.join(10)
        assert not later.is_alive(), f"locked by an interrupt before instruction {at}"
    pool.shutdown()


def test_threads_end_with_whoever_forgets_them_and_with_the_program() -> None:
    program = (
        "import time, torch\n"
        "from airtune.weights.workers import Workers\n"
        "pool = Workers(2, 'test', torch.device('cpu'))\n"
        "threads = pool._threads\n"
        "del pool\n"
        "[thread.join() for thread in threads]\n"
        "pool = Workers(2, 'test', torch.device('cpu'))\n"
        "pool.submit(lambda: (time.sleep(0.1), print('done')))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")
