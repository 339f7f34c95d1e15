"""How much host memory can be had.

What the machine has left is not always ours: in a container or a batch job, a control group allows less, and
who takes more is killed without a word. The kernel counts the page cache as used there. It gives that back
before it kills, so here it counts as available, as it does for the whole machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Names(NamedTuple):
    """Files of a control group, and the lines of its memory.stat that are page cache."""

    limit: str
    used: str
    cached: tuple[str, str]


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Names("memory.max", "memory.current", ("active_file", "inactive_file"))
# Version 2 says "max" for no limit, version 1 the last page below 2**63.
_NO_LIMIT = 2**62


def available_memory_nbytes(root: Path = Path("/")) -> int:
    """Memory that can be had without swapping, page cache included; all there is, where the system does not
    say.

    Args:
        root: of the file system.
    """
    return min([_left_on_machine(root / "proc/meminfo"), *_left_in_groups(root)])


def _left_on_machine(meminfo: Path) -> int:
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.M) if meminfo.exists() else None
    if found is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(found[1]) * 1024


def _left_in_groups(root: Path) -> Iterator[int]:
    """For each limited control group that this process is in, and for those around it."""
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)  # such as 0::/a/b (version 2), or 4:memory:/a/b
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _V1 if controllers else _V2
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        # In a container the path may be the host's, and the group itself what is found at the top.
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (folder / names.limit).exists():
                yield from _left_in_group(folder, names)


def _left_in_group(folder: Path, names: _Names) -> Iterator[int]:
    limit = (folder / names.limit).read_text().strip()
    if limit != "max" and int(limit) < _NO_LIMIT:
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached_nbytes = sum(int(statistics.get(name, 0)) for name in names.cached)
        used_nbytes = int((folder / names.used).read_text()) - cached_nbytes
        yield max(0, int(limit) - used_nbytes)
