"""The elements of a JSON list, one at a time, from a file of any size.

`json.load` holds the whole file, and every row of it as objects, which take several times its bytes. So the
list is cut into its elements first, by following brackets and strings alone, and each element is parsed by
itself. That also gives every row its line, and lets one bad row be a bad row. The list is the file itself, or
the value of "data" in an object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

_CHUNK_NBYTES = 1 << 20
# A whole string, or one byte that has a say in where an element ends. A quote by itself opens a string that
# has no end in sight; JSON has no line ends inside strings.
_TOKEN = re.compile(rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|["\[\]{},]')
_TO_LIST = re.compile(rb"\s*:\s*\[")
_OPEN, _CLOSE, _COMMA, _QUOTE, _END = (b"[", b"{"), (b"]", b"}"), b",", b'"', b""


def list_in(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]] | None:
    """(line, bytes) of each element, or None when the file holds no list but, perhaps, an object a line.

    ValueError, from the iterator too, when brackets or quotes are not closed or something follows the list.
    """
    scanner = _Scanner(stream)
    first = scanner.first_byte()
    if first == b"[":
        scanner.next()
        scanner.drop()
        return _elements(scanner, name, around=0)
    if first == b"{" and _find_data(scanner, name):
        return _elements(scanner, name, around=1)
    return None


class _Scanner:
    """Tokens of a stream. It keeps the bytes from `start` on: those of the element that is being followed."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.buffer = b""
        self.start = 0
        self.line = 1  # in which `start` lies
        self.at = 0  # what was looked at ends here

    def next(self) -> bytes:
        """The next token; `_QUOTE` when a string is not closed, `_END` at the end of the stream."""
        while True:
            match = _TOKEN.search(self.buffer, self.at)
            if match and match[0] != _QUOTE:
                self.at = match.end()
                return match[0]
            self.at = match.start() if match else len(self.buffer)
            is_broken = match is not None and b"\n" in self.buffer[self.at :]
            if is_broken or not self.more():
                return _QUOTE if match else _END

    def first_byte(self) -> bytes:
        """The first byte from here on that is not blank, and empty at the end. It is not looked at yet."""
        while not self.buffer[self.at :].strip():
            self.at = len(self.buffer)
            self.drop()
            if not self.more():
                return b""
        rest = self.buffer[self.at :]
        self.at += len(rest) - len(rest.lstrip())
        self.drop()
        return self.buffer[self.at : self.at + 1]

    def more(self) -> bool:
        # As much again as is kept: an element that spans many chunks is copied a few times, not many.
        chunk = self.stream.read(max(_CHUNK_NBYTES, len(self.buffer) - self.start))
        self.buffer = self.buffer[self.start :] + chunk
        self.at -= self.start
        self.start = 0
        return bool(chunk)

    def drop(self) -> None:
        """Forgets what was looked at."""
        self.line += self.buffer.count(b"\n", self.start, self.at)
        self.start = self.at

    def follows(self, pattern: re.Pattern[bytes]) -> bool:
        """Whether `pattern` comes next; if so it is looked at."""
        while True:
            match = pattern.match(self.buffer, self.at)
            if match:
                self.at = match.end()
                return True
            if self.buffer[self.at :].strip(b" \t\r\n:") or not self.more():
                return False


def _find_data(scanner: _Scanner, name: str) -> bool:
    """Moves into the list under "data" of the object that comes next. False if there is none."""
    scanner.next()
    scanner.drop()
    depth, first_line = 1, scanner.line
    while depth:
        token = scanner.next()
        if token in (_QUOTE, _END):
            return False  # whoever reads lines has the better complaint
        if depth == 1 and token == b'"data"' and scanner.follows(_TO_LIST):
            scanner.drop()
            return True
        depth += (token in _OPEN) - (token in _CLOSE)
        scanner.drop()
    if scanner.line > first_line:
        raise ValueError(
            f'{name}: one object over several lines, and no list is called "data" in it: expected a list of '
            'objects, {"data": [objects]}, or one object a line'
        )
    return False


def _elements(scanner: _Scanner, name: str, *, around: int) -> Iterator[tuple[int, bytes]]:
    """`around`: the brackets that are open outside the list."""
    depth, count = 1, 0
    while depth:
        token = scanner.next()
        if token in (_QUOTE, _END):
            raise _unclosed(scanner, name, token)
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth == 0 or (depth == 1 and token == _COMMA):
            element = scanner.buffer[scanner.start : scanner.at - 1]
            if element.strip() or depth or count:  # [] has no element, [1,] has an empty one
                blank = element[: len(element) - len(element.lstrip())]
                yield scanner.line + blank.count(b"\n"), element.strip()
            count += 1
            scanner.drop()
    _expect_the_end(scanner, name, around)


def _expect_the_end(scanner: _Scanner, name: str, depth: int) -> None:
    while depth:
        token = scanner.next()
        if token in (_QUOTE, _END):
            raise _unclosed(scanner, name, token)
        depth += (token in _OPEN) - (token in _CLOSE)
        scanner.drop()
    if scanner.first_byte():
        raise ValueError(
            f"{name}:{scanner.line}: something follows the end of the list: is it two files in one?"
        )


def _unclosed(scanner: _Scanner, name: str, token: bytes) -> ValueError:
    what = "a string is not closed" if token == _QUOTE else "the list is not closed"
    scanner.at = scanner.start
    scanner.first_byte()  # the complaint names the line of the element, not that of the bracket before it
    return ValueError(f"{name}:{scanner.line}: not JSON, {what} from here to the end: was the file cut?")
