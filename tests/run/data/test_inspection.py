"""What is shown of training data is what is learned, and cannot harm a terminal."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from airtune.run.data.inspection import BRACKETS, COLOURS, inspection, marked, marks_for, show
from airtune.run.data.prepare import prepare
from tests.tiny_tokenizer import CHAT_ROW, tiny_tokenizer, write_jsonl


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(data, tokenizer, **options) -> str:
    return "".join(inspection(data, tokenizer, name="training data", **({"samples": 1} | options)))


def test_the_learned_part_of_a_row_stands_between_marks(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    data = prepare(write_jsonl(tmp_path, CHAT_ROW), tokenizer)
    want = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n{0}yes<|im_end|>{1}\n"
    assert want.format("[[", "]]") in shown(data, tokenizer)
    assert "what is learned stands between [[ and ]]" in shown(data, tokenizer)
    coloured = shown(data, tokenizer, marks=COLOURS)
    assert want.format("\x1b[1;32m", "\x1b[0m") in coloured and "[[" not in coloured
    assert f"--- {tmp_path}/rows.jsonl:1: 16 tokens, 2 learned\n" in coloured


def test_the_account_and_the_lengths_come_first(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    rows = [{"text": "yes " * n} for n in (1, 2, 2, 2, 9, 400)]
    data = prepare(write_jsonl(tmp_path, *rows), tokenizer, max_length=30)
    text = shown(data, tokenizer, samples=0)
    assert str(data.summary) in text and "---" not in text and "[[" not in text
    lines = [line.split() for line in text[text.index("tokens of a row") :].splitlines()]
    counts = {int(line[0]): int(line[3]) for line in lines[1:] if line[1:2] == ["-"]}
    lengths = data.lengths().tolist()
    assert sum(counts.values()) == 5 and counts[min(lengths)] == 1
    assert max(counts, key=lambda first: counts[first]) <= lengths[1] and max(counts.values()) == 3
    assert lines[-1] == ["longest", "before", "a", "cut", str(data.summary.longest)]
    assert data.summary.longest > 400


def test_rows_of_one_length_are_one_line(tmp_path: Path) -> None:
    data = prepare(write_jsonl(tmp_path, {"text": "yes"}, {"text": "yes"}), tiny_tokenizer())
    assert len(set(data.lengths().tolist())) == 1
    assert shown(data, tiny_tokenizer(), samples=0).rstrip().endswith(" 2  " + "#" * 40)


def test_samples_are_spread_over_the_data(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    data = prepare(write_jsonl(tmp_path, *({"text": "yes"} for _ in range(10))), tokenizer)
    heads = [line for line in shown(data, tokenizer, samples=3).splitlines() if line.startswith("---")]
    assert [head.split(": ")[0].rpartition(":")[2] for head in heads] == ["1", "4", "7"]
    assert shown(data, tokenizer, samples=99).count("---") == 10


def test_a_character_of_several_tokens_is_whole() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("yes漢字", add_special_tokens=False)["input_ids"]
    assert len(ids) == 7  # a token for the word and three for each character
    for border, text in [(1, "yes[[漢字]]"), (2, "yes[[漢字]]"), (3, "yes[[漢字]]"), (4, "yes漢[[字]]")]:
        learned = [False] * border + [True] * (7 - border)
        assert marked(tokenizer, ids, learned, BRACKETS) == text


def test_spaces_between_parts_stay_where_a_tokenizer_drops_a_first_one() -> None:
    backend = Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁b": 4}, [("▁", "a"), ("▁", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tokenizer("a b")["input_ids"]
    assert tokenizer.decode(ids[1:]) == "b"  # decoded apart, the space between them would be lost
    assert marked(tokenizer, ids, [False, True], BRACKETS) == "a[[ b]]"


def test_long_parts_are_shown_by_their_ends() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("yes" + " no" * 2_000, add_special_tokens=False)["input_ids"]
    text = marked(tokenizer, ids, [False] * len(ids), BRACKETS)
    assert text.startswith("yes no no") and text.endswith(" no no") and "5,003 characters" in text
    assert len(text) < 1_100


def test_data_cannot_steer_the_terminal() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("\x1b[31m\r\x07yes\n\t\u202e漢", add_special_tokens=False)["input_ids"]
    text = marked(tokenizer, ids, [True] * len(ids), BRACKETS)
    assert text == "[[\\x1b[31m\\r\\x07yes\n\t\\u202e漢]]"


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert marks_for(Terminal()) == (COLOURS if coloured else BRACKETS)
    assert marks_for(io.StringIO()) == BRACKETS


def test_what_an_encoding_lacks_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    show(stream, iter(["é 漢\n"]))
    assert raw.getvalue() == b"\xe9 \\u6f22\n"


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        show(stream, ("line\n" * 10_000 for _ in range(10)))
