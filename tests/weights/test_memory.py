from __future__ import annotations

import os
from pathlib import Path

import pytest

from airtune.weights.memory import available_memory_nbytes

ALL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of a machine with 1,024,000 bytes available."""
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 1000 kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def group_v2(folder: Path, limit: str, used: int, cached: int) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 7\nfile 999\nactive_file {cached - 10}\ninactive_file 10\n")


def group_v1(folder: Path, limit: int, used: int, cached: int) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{used}\n")
    own = "active_file 1\ninactive_file 1\n"
    write(folder / "memory.stat", f"{own}total_active_file {cached - 10}\ntotal_inactive_file 10\n")


def test_on_this_machine() -> None:
    assert 0 < available_memory_nbytes() <= ALL


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_memory_nbytes(tmp_path) == ALL


def test_no_group_that_limits(root: Path) -> None:
    write(root / "proc/self/cgroup", "3:cpu,cpuacct:/a\n1:name=systemd:/\n0::/a\n")
    group_v2(root / "sys/fs/cgroup/a", "max", used=10, cached=10)
    assert available_memory_nbytes(root) == 1_024_000


def test_page_cache_of_the_group_is_available(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a/b\n")
    group_v2(root / "sys/fs/cgroup/a/b", "5000", used=4000, cached=3000)
    assert available_memory_nbytes(root) == 5000 - (4000 - 3000)


def test_a_group_around_it_allows_less(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a/b\n")
    group_v2(root / "sys/fs/cgroup/a/b", "5000", used=100, cached=10)
    group_v2(root / "sys/fs/cgroup/a", "6000", used=4000, cached=10)
    assert available_memory_nbytes(root) == 6000 - (4000 - 10)


def test_more_is_used_than_allowed(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    group_v2(root / "sys/fs/cgroup", "5000", used=6000, cached=10)
    assert available_memory_nbytes(root) == 0


def test_version_1(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpuset,memory:/a\n0::/\n")
    group_v1(root / "sys/fs/cgroup/memory/a", 5000, used=4000, cached=3000)
    group_v1(root / "sys/fs/cgroup/memory", 2**63 - 4096, used=9000, cached=10)
    assert available_memory_nbytes(root) == 5000 - (4000 - 3000)


def test_the_path_is_the_hosts(root: Path) -> None:
    """In a container without a namespace of its own for groups."""
    write(root / "proc/self/cgroup", "4:memory:/docker/1234\n")
    group_v1(root / "sys/fs/cgroup/memory", 5000, used=100, cached=10)
    assert available_memory_nbytes(root) == 5000 - (100 - 10)
