"""A matrix that visits the device a few rows at a time.

The output projection of a large model is its largest matrix (248320 x 5120 in bf16: 2.5 GB, three times a
layer) and is needed once a step, row by row. It never is on the device whole: chunks of rows pass through
two small buffers, the next one on its way while the current one is used. On the CPU a chunk is a view of
the mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

DEFAULT_CHUNK_NBYTES = 64 * 2**20


class ChunkedMatrix:
    """Rows [V, D] of a host tensor (a view of a file, or in RAM), brought to `device` in chunks.

    Args:
        matrix_VD: the whole matrix on the host, as stored.
        dtype: compute dtype of the chunks.
        release: called with the first row and the row count once a chunk is done with, to give mapped pages
            back.
        chunk_nbytes: size of a chunk in compute form.
    """

    def __init__(
        self,
        matrix_VD: torch.Tensor,
        *,
        device: torch.device,
        dtype: torch.dtype,
        release: Callable[[int, int], None] | None = None,
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
    ) -> None:
        self._matrix_VD, self.device, self.dtype = matrix_VD, device, dtype
        self._release = release
        self.rows, self.columns = matrix_VD.shape
        self._chunk_rows = max(1, min(self.rows, chunk_nbytes // (self.columns * dtype.itemsize)))
        self.nbytes = self.rows * self.columns * dtype.itemsize

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows on the device); each is valid until the next is asked for."""
        moved = self._on_host() if self.device.type == "cpu" else self._on_device()
        for start, chunk in moved:
            yield start, chunk
            if self._release is not None:
                self._release(start, len(chunk))

    def _starts(self) -> range:
        return range(0, self.rows, self._chunk_rows)

    def _rows(self, start: int) -> torch.Tensor:
        return self._matrix_VD[start : start + self._chunk_rows]

    def _on_host(self) -> Iterator[tuple[int, torch.Tensor]]:
        for start in self._starts():
            yield start, self._rows(start).to(self.dtype)

    def _on_device(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Two pinned buffers and two device buffers, used in turn; events both ways."""
        shape = (self._chunk_rows, self.columns)
        stream = torch.Stream(device=self.device)
        hosts = [torch.empty(shape, dtype=self.dtype, pin_memory=True) for _ in range(2)]
        devices = [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        copied: list[torch.Event | None] = [None, None]
        used: list[torch.Event | None] = [None, None]

        def send(turn: int, start: int) -> torch.Tensor:
            if (event := copied[turn]) is not None:
                event.synchronize()
            rows = self._rows(start)
            host, chunk = hosts[turn][: len(rows)], devices[turn][: len(rows)]
            host.copy_(rows)
            with stream:
                if (event := used[turn]) is not None:
                    stream.wait_event(event)
                chunk.copy_(host, non_blocking=True)
                copied[turn] = stream.record_event()
            return chunk

        starts = list(self._starts())
        # Fresh device memory may still be read by kernels queued before it was freed to the allocator.
        stream.wait_event(torch.accelerator.current_stream(self.device).record_event())
        coming = send(0, starts[0])
        for i, start in enumerate(starts):
            chunk, turn = coming, i % 2
            if i + 1 < len(starts):
                coming = send(1 - turn, starts[i + 1])
            current = torch.accelerator.current_stream(self.device)
            event = copied[turn]
            assert event is not None
            current.wait_event(event)
            yield start, chunk
            used[turn] = torch.accelerator.current_stream(self.device).record_event()
