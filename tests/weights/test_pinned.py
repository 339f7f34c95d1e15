"""Pinned buffers: nothing is lost between the pieces, and little to powers of two."""

from __future__ import annotations

import pytest

from airtune.weights.pinned import piece_nbytes


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 64, 1000, 2**20 - 1, 2**20, 9_830_400, 770_000_001])
def test_pieces(nbytes: int) -> None:
    sizes = piece_nbytes(nbytes, 2**25)
    assert sum(sizes) == nbytes and all(0 < size <= 2**25 for size in sizes)
    rounded_up = [1 << (size - 1).bit_length() for size in sizes]
    assert sizes[:-1] == rounded_up[:-1]
    assert sum(rounded_up) <= nbytes * 17 / 16
