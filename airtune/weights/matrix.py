"""A matrix that visits the device a few rows at a time.

The output projection of a large model is its largest matrix (248320 x 5120 in bf16: 2.5 GB, three times a
layer) and is needed once a step, row by row. It is never on the device whole: chunks of rows pass through two
small buffers, the next one on its way while the current one is used. On the CPU a chunk is a view of the
mapped file, whose pages a thread brings in ahead of the use and gives back after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from airtune.weights.checkpoint import StoredTensor
from airtune.weights.file_map import FileMap
from airtune.weights.pinned import host_buffer, owned_by
from airtune.weights.reader import ByteRange, ByteReader
from airtune.weights.workers import Task, Workers

CHUNK_NBYTES = 32 * 2**20
# On the CPU nothing travels, so small chunks cost nothing; two of them are mapped while the last layer's
# graph waits for the loss, and that is the peak of a step.
MAPPED_CHUNK_NBYTES = 16 * 2**20


class Rows(Protocol):
    """Where the rows of a matrix [V, D] are on the host."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Rows in host memory, without a copy."""
        ...

    def copy(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Write rows, cast to the dtype of `into`, to host memory."""
        ...

    def lacks(self, start: int, stop: int) -> bool:
        """Whether using these rows would wait for the disk."""
        ...

    def bring(self, start: int, stop: int) -> None:
        """Have these rows in memory, where `view` shows them."""
        ...

    def release(self, start: int, stop: int) -> None:
        """These rows are not needed for a while."""
        ...


class TensorRows:
    """Rows of a tensor that is in RAM anyway (a table tied to the head, or one that had to be converted)."""

    def __init__(self, matrix_VD: torch.Tensor) -> None:
        self._matrix_VD = matrix_VD
        self.shape = (matrix_VD.shape[0], matrix_VD.shape[1])

    def view(self, start: int, stop: int) -> torch.Tensor:
        return self._matrix_VD[start:stop]

    def copy(self, start: int, stop: int, into: torch.Tensor) -> None:
        into.copy_(self._matrix_VD[start:stop])

    def lacks(self, start: int, stop: int) -> bool:
        return False

    def bring(self, start: int, stop: int) -> None:
        pass

    def release(self, start: int, stop: int) -> None:
        pass


class FileRows:
    """Rows of a matrix as it lies in a checkpoint file."""

    def __init__(
        self, stored: StoredTensor, matrix_VD: torch.Tensor, reader: ByteReader, files: FileMap
    ) -> None:
        """`matrix_VD`: the tensor as a view of the file."""
        self._stored, self._matrix_VD, self._reader, self._files = stored, matrix_VD, reader, files
        self._row_nbytes = matrix_VD.shape[1] * matrix_VD.element_size()
        self.shape = (matrix_VD.shape[0], matrix_VD.shape[1])

    def view(self, start: int, stop: int) -> torch.Tensor:
        return self._matrix_VD[start:stop]

    def copy(self, start: int, stop: int, into: torch.Tensor) -> None:
        if into.dtype == self._matrix_VD.dtype:
            self._reader.read_into([self._range(start, stop)], into.view(-1).view(torch.uint8))
        else:
            into.copy_(self._matrix_VD[start:stop])
            self.release(start, stop)

    def lacks(self, start: int, stop: int) -> bool:
        return self._files.lacks([self._range(start, stop)])

    def bring(self, start: int, stop: int) -> None:
        self._files.populate([self._range(start, stop)])

    def release(self, start: int, stop: int) -> None:
        self._files.release([self._range(start, stop)])

    def _range(self, start: int, stop: int) -> ByteRange:
        offset = self._stored.offset + start * self._row_nbytes
        return ByteRange(self._stored.file, offset, (stop - start) * self._row_nbytes, 0)


class ChunkedMatrix:
    """Rows [V, D], brought to `device` in chunks.

    Attributes:
        stays: leave rows where they were used: mapped (on the CPU), or on the device once they all have been
            there. Whoever generates uses all of them again with each token.
        nbytes: of the whole matrix, in compute form.

    Args:
        dtype: compute dtype of the chunks.
        chunk_nbytes: size of a chunk in compute form; None for what suits the device.
    """

    def __init__(
        self, rows: Rows, *, device: torch.device, dtype: torch.dtype, chunk_nbytes: int | None = None
    ) -> None:
        self._rows, self.device, self.dtype = rows, device, dtype
        self._stays = False
        self._kept: list[tuple[int, torch.Tensor]] = []
        self.rows, self.columns = rows.shape
        self.nbytes = self.rows * self.columns * dtype.itemsize
        on_cpu = device.type == "cpu"
        if chunk_nbytes is None:
            chunk_nbytes = MAPPED_CHUNK_NBYTES if on_cpu else CHUNK_NBYTES
        step = max(1, min(self.rows, chunk_nbytes // (self.columns * dtype.itemsize)))
        self._spans = [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]
        self._pipe = None if on_cpu else _Pipe(rows, (step, self.columns), dtype, device)
        self._worker = Workers(1, "airtune-head", device) if on_cpu else None
        self._bringing: dict[tuple[int, int], Task[None]] = {}

    @property
    def stays(self) -> bool:
        return self._stays

    @stays.setter
    def stays(self, value: bool) -> None:
        self._stays = value
        if not value:
            self._kept = []

    @property
    def held_nbytes(self) -> int:
        """Device memory of rows that stay."""
        return sum(rows_VD.nbytes for _, rows_VD in self._kept)

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows on the device); each is valid until the next is asked for."""
        if self._pipe is not None:
            yield from self._kept or self._piped(self._pipe)
            return
        self._bring(self._spans[0])
        for span, following in zip(self._spans, [*self._spans[1:], None], strict=True):
            if (bringing := self._bringing.pop(span, None)) is not None:
                bringing.result()
            if following is not None:
                self._bring(following)
            try:
                yield span[0], self._rows.view(*span).to(self.dtype)
            finally:
                self._give_back(span)

    def announce(self) -> None:
        """The chunks are asked for soon: have the first one in host memory by then."""
        if self._pipe is None:
            self._bring(self._spans[0])
        elif not self._kept:
            self._pipe.start(self._spans[0])

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._worker is not None:
            self._worker.shutdown()

    def _piped(self, pipe: _Pipe) -> Iterator[tuple[int, torch.Tensor]]:
        if not self.stays:
            yield from pipe.chunks(self._spans)
            return
        kept = []
        for start, rows_VD in pipe.chunks(self._spans):
            with torch._C._InferenceMode(False):  # a training step may use them later
                kept.append((start, rows_VD.clone()))
            yield kept[-1]
        if self.stays:
            self._kept = kept

    def _bring(self, span: tuple[int, int]) -> None:
        """On the CPU: have the thread map these rows, unless they are mapped or on their way."""
        assert self._worker is not None
        if span not in self._bringing and (not self.stays or self._rows.lacks(*span)):
            self._bringing[span] = self._worker.submit(self._rows.bring, *span)

    def _give_back(self, span: tuple[int, int]) -> None:
        assert self._worker is not None
        if not self.stays:
            self._worker.submit(self._rows.release, *span)


class _Pipe:
    """Two pinned buffers and two device buffers, used in turn. A thread of its own reads into the former."""

    def __init__(self, rows: Rows, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._rows, self._shape, self._dtype, self._device = rows, shape, dtype, device
        self._stream = torch.Stream(device=device)
        self._hosts = [host_buffer(shape, dtype) for _ in range(2)]
        self._copied: list[torch.Event | None] = [None, None]
        self._worker = Workers(1, "airtune-head", device)
        self._begun: tuple[tuple[int, int], Task[torch.Tensor]] | None = None

    def start(self, span: tuple[int, int]) -> None:
        """Begin to read a first chunk."""
        if self._begun is None:
            self._begun = (span, self._worker.submit(self._read, 0, span))

    def chunks(self, spans: list[tuple[int, int]]) -> Iterator[tuple[int, torch.Tensor]]:
        self.start(spans[0])
        assert self._begun is not None and self._begun[0] == spans[0]
        reading, self._begun = self._begun[1], None
        # On the device only while it is used: between two passes the memory is for layers.
        devices = [torch.empty(self._shape, dtype=self._dtype, device=self._device) for _ in range(2)]
        current = torch.accelerator.current_stream(self._device)
        # Fresh memory may still be read by kernels that were queued before it was freed.
        used = [current.record_event(), current.record_event()]
        try:
            for i, span in enumerate(spans):
                turn = i % 2
                host = reading.result()
                if i + 1 < len(spans):
                    reading = self._worker.submit(self._read, 1 - turn, spans[i + 1])
                chunk = devices[turn][: len(host)]
                with self._stream:
                    self._stream.wait_event(used[turn])
                    chunk.copy_(host, non_blocking=True)
                    copied = self._copied[turn] = self._stream.record_event()
                torch.accelerator.current_stream(self._device).wait_event(copied)
                yield span[0], chunk
                used[turn] = torch.accelerator.current_stream(self._device).record_event()
        finally:
            for device in devices:
                owned_by(device, self._stream)

    def _read(self, turn: int, span: tuple[int, int]) -> torch.Tensor:
        """In the thread: rows into a pinned buffer, once the copy out of it is done."""
        if (event := self._copied[turn]) is not None:
            event.synchronize()
        host = self._hosts[turn][: span[1] - span[0]]
        self._rows.copy(*span, host)
        return host

    def close(self) -> None:
        self._worker.shutdown()
