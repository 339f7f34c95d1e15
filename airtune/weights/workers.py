"""Threads that bring weights to a device.

A thread that never chose a card is on card 0. Using a stream of another card from there goes back to card 0
afterwards, and CUDA then opens a context on it: half a gigabyte, on a card that may be full.

The library's ThreadPoolExecutor takes its locks in Python, and an interrupt (Ctrl-C) between taking one and
using it leaves it taken: whoever catches the interrupt and goes on, in a notebook say, waits for ever. Here
all that two threads share is a queue and a lock that are written in C; no interrupt divides their calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Task(Generic[T]):
    """What a thread was given to do."""

    _value: T
    _error: BaseException | None = None

    def __init__(self) -> None:
        self._undone = threading.Lock()
        self._undone.acquire()

    def run(self, work: Callable[..., T], *args: Any) -> None:
        try:
            self._value = work(*args)
        except BaseException as error:  # noqa: BLE001 (result() raises it)
            self._error = error
        finally:
            self._undone.release()
            del self, work, args  # an error holds this frame, which would hold the error

    def result(self) -> T:
        """What the work returned, or raised, once it is done."""
        try:
            with self._undone:
                if self._error is not None:
                    raise self._error
                return self._value
        finally:
            del self  # likewise


class Workers:
    """Threads whose current device is `device`, where that is an accelerator with an index."""

    def __init__(self, threads: int, name: str, device: torch.device) -> None:
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        where = (self._given, device)
        self._threads = [
            threading.Thread(target=_work, args=where, name=f"{name}_{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._given, self._threads)

    def submit(self, work: Callable[..., T], *args: Any) -> Task[T]:
        """Have a thread call `work(*args)`, after what was given to them before."""
        if not self._end.alive:
            raise RuntimeError("the threads of this pool have ended")
        task = Task[T]()
        self._given.put(partial(task.run, work, *args))
        return task

    def shutdown(self) -> None:
        """End the threads, once they have done what they were given."""
        self._end()
        for thread in self._threads:
            thread.join()


def _work(given: SimpleQueue[Callable[[], None] | None], device: torch.device) -> None:
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device)
    while (run := given.get()) is not None:
        run()
        del run  # not held while there is nothing to do


def _end(given: SimpleQueue[Callable[[], None] | None], threads: list[threading.Thread]) -> None:
    """Also of a pool that was forgotten; and before Python ends, which ends threads in the middle of C++."""
    for _ in threads:
        given.put(None)
    if not threading.main_thread().is_alive():
        for thread in threads:
            thread.join()
