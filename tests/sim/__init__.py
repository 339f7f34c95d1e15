"""A simulated accelerator for tests: the PyTorch device "sim" (see sim.cpp for what it models and how).

How a test uses it. The checkout is on the path (`pythonpath = ["."]` in pyproject's pytest section) and
tests/ is a package in it; tests/conftest.py imports `sim_fixture`. So every test may ask for the device by
name:

    from tests.sim import Simulator

    def test_something(sim: Simulator) -> None:
        slot = torch.empty(4, device="sim")
        ...                     # torch.accelerator, torch.Stream and torch.Event drive it
        assert sim.peak() < 100
        # when the test ends, any data race that it ran into fails it

One process for all tests. PyTorch can neither unload nor rename a backend: once loaded, the *type* of the
current accelerator is "sim" until the process ends. But whether one is available is ours to say, and it is
available only while a test holds the fixture. So product code must ask `torch.accelerator.is_available()` or
`torch.accelerator.current_accelerator(check_available=True)`, as it must anyway: PyTorch built for CUDA
behaves just so on a machine without a GPU. Where a real accelerator is present, loading would take its place,
so the fixture skips; hide the real one (CUDA_VISIBLE_DEVICES="") to run these tests there.

The first use compiles sim.cpp (about a minute; needs g++ and ninja) into a cache folder, under a name that
holds a digest of the source and the version of PyTorch; later runs load that file. AIRTUNE_TEST_CACHE names
the folder, by default ~/.cache/airtune-tests.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_SOURCE = Path(__file__).with_name("sim.cpp")
_FLAGS = ["-O1", "-g0"]


class Simulator:
    """Handle of the loaded device: what a test may set and read. All sizes are bytes."""

    def __init__(self, extension: types.ModuleType) -> None:
        self._extension = extension
        self.device = torch.device("sim", 0)

    def now(self) -> int:
        """Bytes of device memory in use, exactly as asked for."""
        return self._extension.now()

    def peak(self) -> int:
        """The most bytes in use since the last `reset_peak` or `reset`."""
        return self._extension.peak()

    def reset_peak(self) -> None:
        self._extension.reset_peak()

    def set_cap(self, nbytes: int | None) -> None:
        """Beyond `nbytes` in use an allocation raises torch.OutOfMemoryError; None restores the 16 GiB."""
        self._extension.set_cap(nbytes)

    def races(self) -> list[str]:
        """The data races found since the last `reset`, one sentence each."""
        return self._extension.races()

    def pending(self) -> int:
        """How many copies and waits are still queued on all streams."""
        return self._extension.pending()

    def synchronize(self) -> None:
        """Run everything that is queued; the host has then waited for every stream."""
        self._extension.synchronize()

    def traffic(self) -> dict[str, int]:
        """Copies and bytes over the bus since the last `reset`.

        Keys: h2d_copies, h2d_nbytes, d2h_copies, d2h_nbytes, and unpinned_late_copies: non-blocking copies
        whose host side is not pinned, which hardware would not overlap with anything.
        """
        return self._extension.traffic()

    def reset(self) -> None:
        """Run what is queued, then forget races, peak, traffic and cap. Tensors stay as they are."""
        self._extension.start_epoch()
        self._extension.set_cap(None)
        self._extension.reset_peak()
        self._extension.reset_traffic()

    @contextlib.contextmanager
    def visible(self) -> Iterator[None]:
        """Inside, torch.accelerator.is_available() is true."""
        self._extension.set_visible(True)
        try:
            yield
        finally:
            self._extension.set_visible(False)


@functools.cache
def load_sim() -> Simulator:
    """Build (once per source and PyTorch version) and register the device, not yet visible, for this process.

    Raises:
        RuntimeError: the compiler failed (the message holds its output), or a real accelerator is present.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            'a CUDA device is present and "sim" would take its place: set CUDA_VISIBLE_DEVICES=""'
        )
    extension = _import(_build())
    extension.set_visible(False)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # A device's autograd thread drops the graph after backward() has returned, and that takes the GIL. In
    # a process that ends right then, the interpreter kills the thread and the process aborts: let it finish.
    atexit.register(time.sleep, 0.1)
    return Simulator(extension)


@pytest.fixture(name="sim")
def sim_fixture() -> Iterator[Simulator]:
    """The simulated accelerator, visible and freshly reset; a data race during the test makes it fail."""
    if torch.cuda.is_available():
        pytest.skip('a real accelerator is present: set CUDA_VISIBLE_DEVICES="" to test on the simulated one')
    simulator = load_sim()
    simulator.reset()
    with simulator.visible():
        yield simulator
        simulator.synchronize()  # races of copies that were still queued count too
    races = simulator.races()
    simulator.reset()
    if races:
        pytest.fail("data races on the simulated accelerator:\n" + "\n".join(races), pytrace=False)


def _build() -> Path:
    """Path of the compiled extension. Processes that start together build it once."""
    version = f"{torch.__version__} {torch.version.git_version} {sys.implementation.cache_tag} {_FLAGS}"
    digest = hashlib.sha256(_SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("AIRTUNE_TEST_CACHE", Path.home() / ".cache" / "airtune-tests"))
    name = f"airtune_sim_{digest}"
    built = cache / f"{name}.so"
    if built.exists():
        return built
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # unlike a lock file of one's own, it dies with its owner
        if not built.exists():
            _compile(name, cache / name)
            os.replace(cache / name / f"{name}.so", built)
            shutil.rmtree(cache / name)
    return built


def _compile(name: str, folder: Path) -> None:
    from torch.utils import cpp_extension

    os.environ.setdefault("CXX", "g++")
    if shutil.which("ninja") is None:  # installed in an environment whose bin folder is not on PATH
        import ninja

        os.environ["PATH"] += os.pathsep + ninja.BIN_DIR
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted build left, its lock included
    folder.mkdir()
    cpp_extension.load(
        name,
        [str(_SOURCE)],
        build_directory=str(folder),
        extra_cflags=_FLAGS,
        is_python_module=False,
        verbose=False,
    )


def _import(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _device_module(extension: types.ModuleType) -> types.ModuleType:
    """What torch expects to find as `torch.sim`, under the names that torch.cuda uses."""
    generator: torch.Generator = extension.default_generator()
    module = types.ModuleType("torch.sim")

    @contextlib.contextmanager
    def device(index: object) -> Iterator[None]:
        yield  # there is one device only

    members = {
        "is_available": extension.visible,
        "is_initialized": lambda: True,
        "_initialized": True,  # or torch.utils.checkpoint would not keep the generator's state
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": device,
        "synchronize": lambda device=None: extension.synchronize(),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: extension.now(),
        "memory_reserved": lambda device=None: extension.now(),
        "max_memory_allocated": lambda device=None: extension.peak(),
        "max_memory_reserved": lambda device=None: extension.peak(),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(),
        "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(),
        "default_generators": (generator,),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "initial_seed": generator.initial_seed,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
        "_is_in_bad_fork": lambda: False,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
