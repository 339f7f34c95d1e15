"""Sizes in bytes as people write them: "4GB", "512MiB", 1000000."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_bytes(size: str | int) -> int:
    """Bytes in `size`: an integer, or a number with a unit (kB, MB, GB, TB of 1000; KiB, MiB, GiB, TiB of
    1024).

    Raises:
        ValueError: not a size, or not positive.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(
                f'{size!r} is not a size; write bytes as a number with a unit, such as "4GB" or "512MiB"'
            )
        nbytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if nbytes <= 0:
        raise ValueError(f"a size must be positive, got {size!r}")
    return nbytes
