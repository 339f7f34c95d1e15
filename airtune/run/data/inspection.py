"""What a run would learn from, shown before hours are spent on it: counts, lengths, and samples as they are.

A wrong template, a missing end token or a mask on the wrong turn leave a plausible loss; they are plain to
see in the decoded ids with the learned part marked. So the samples are made from the very ids and labels
that training gets, not from the text they came from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TextIO

import numpy as np
from transformers import PreTrainedTokenizerBase

from airtune.run.data.forms import IGNORED_LABEL
from airtune.run.data.prepared import PreparedData

_BUCKETS = 10
_BAR_WIDTH = 40
_SHOWN_CHARACTERS = 1_000  # of one stretch; of a longer one, both ends

COLOURS = ("\x1b[1;32m", "\x1b[0m")
BRACKETS = ("[[", "]]")


def marks_for(stream: TextIO) -> tuple[str, str]:
    """What opens and closes a learned part: colours on a terminal (see no-color.org), else brackets."""
    colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return COLOURS if colour else BRACKETS


def inspection(
    data: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    samples: int,
    marks: tuple[str, str] = BRACKETS,
) -> Iterator[str]:
    """The account of `data`, its lengths and `samples` of its rows, evenly spread, in pieces of text."""
    yield f"{name}\n{data.summary}\n\n{_histogram(data)}\n"
    shown = min(samples, len(data))
    if shown:
        yield (
            f"\nwhat is learned stands between {BRACKETS[0]} and {BRACKETS[1]}\n" if marks == BRACKETS else ""
        )
    for index in (i * len(data) // shown for i in range(shown)):
        row = data[index]
        learned = [label != IGNORED_LABEL for label in row["labels"]]
        yield f"\n--- {data.where(index)}: {len(learned):,} tokens, {sum(learned):,} learned\n"
        yield marked(tokenizer, row["input_ids"], learned, marks) + "\n"


def marked(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], learned: Sequence[bool], marks: tuple[str, str]
) -> str:
    """The text of `ids`, with the learned parts between the two `marks`."""
    text, start, parts = _decoded(tokenizer, ids), 0, []
    end_token = 0
    for is_learned, run in groupby(learned):
        end_token += sum(1 for _ in run)
        # Tokens depend on what is before them (a first space may go), and a character may take several. So
        # beginnings are decoded, not parts; a character that is cut belongs to the part that ends it.
        before = text if end_token == len(ids) else _decoded(tokenizer, ids[:end_token]).rstrip("\ufffd")
        end = max(start, len(before))
        part = _printable(_shortened(text[start:end]))
        parts.append(f"{marks[0]}{part}{marks[1]}" if is_learned else part)
        start = end
    return "".join(parts)


def show(stream: TextIO, pieces: Iterable[str]) -> None:
    """Write `pieces`, escaping what the encoding of `stream` lacks, until nobody reads on (`| head`)."""
    encoding = stream.encoding or "utf-8"
    try:
        for piece in pieces:
            stream.write(piece.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        # Or Python complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _histogram(data: PreparedData) -> str:
    """Rows by length, as they are used."""
    lengths_R = data.lengths()
    shortest, longest = int(lengths_R.min()), int(lengths_R.max())
    width = -(-(longest - shortest + 1) // _BUCKETS)
    counts = np.bincount((lengths_R - shortest) // width)
    lines = [f"{'tokens of a row':>21}{'rows':>12}"]
    for bucket, count in enumerate(counts.tolist()):
        first = shortest + bucket * width
        bar = "#" * -(-count * _BAR_WIDTH // int(counts.max()))
        lines.append(f"{f'{first:,} - {min(first + width - 1, longest):,}':>21}{count:>12,}  {bar}".rstrip())
    if data.summary.longest > data.summary.max_length:
        lines.append(f"{'longest before a cut':>21}{data.summary.longest:>12,}")
    return "\n".join(lines)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _shortened(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"


def _printable(text: str) -> str:
    """`text` without the control characters by which data could steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
