"""The memory measurement sees what a process holds, and says so when that is too much."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests import zoo

SCRIPTS = Path(__file__).parents[2] / "scripts"
MB = 1_000_000


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("measure_memory")


def test_reads_what_the_kernel_says(script: ModuleType) -> None:
    status = "Name:\tx\nVmHWM:\t    9 kB\nVmRSS:\t6 kB\nRssAnon:\t3 kB\nRssFile:\t2 kB\nRssShmem:\t1 kB\n"
    memory = script.Memory.of(status)
    assert (memory.anonymous, memory.file, memory.total, memory.record) == (4096, 2048, 6144, 9216)


def test_a_process_that_has_ended_has_no_memory(script: ModuleType) -> None:
    assert script.Memory.of("Name:\tx\nState:\tZ (zombie)\n") is None


def test_sees_memory_that_is_given_back_before_the_end(script: ModuleType, tmp_path: Path) -> None:
    """200 MB of its own and 100 MB of a mapped file, each for a quarter of a second."""
    code = (
        "import mmap, sys, time\n"
        "held = bytearray(b'x') * 200_000_000; time.sleep(0.25); del held\n"
        "file = open(sys.argv[1], 'r+b'); file.truncate(100_000_000)\n"
        "view = mmap.mmap(file.fileno(), 0); sum(view[::4096]); time.sleep(0.25); view.close()\n"
    )
    mapped = tmp_path / "mapped"
    mapped.touch()
    with subprocess.Popen([sys.executable, "-c", code, str(mapped)], text=True) as process:
        peak = script.watch(process)
    assert process.returncode == 0
    assert 200 * MB < peak.total < 260 * MB
    assert peak.anonymous > 200 * MB
    assert abs(peak.record - peak.total) < 10 * MB


def test_a_model_smaller_than_the_libraries_fails(
    script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole way, on a checkpoint of a megabyte: torch alone is hundreds."""
    folder = zoo.make("llama", tmp_path)
    options = ["--checkpoint", str(folder), "--steps", "1", "--rows", "2", "--tokens", "8"]
    assert script.main(options) == 1
    said = capfd.readouterr()
    facts = dict(line.split(maxsplit=1) for line in said.out.splitlines())
    assert float(facts["ratio"].split()[0]) > 100
    assert 0 < float(facts["libraries"].split()[0]) < float(facts["peak"].split()[0])
    assert len(facts["losses"].split(",")) == 1
    assert said.err.endswith("The peak is not below the checkpoint's size.\n")


@pytest.mark.slow
def test_a_gigabyte_trains_in_less_than_a_gigabyte(
    script: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--params", "0.6B", "--steps", "2"]) == 0
    assert "checkpoint  1." in capfd.readouterr().out
