"""Kept rows: found again when nothing has changed, never when anything has."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from airtune.run.data import cache
from airtune.run.data.encode import Encoder
from airtune.run.data.prepare import prepare
from airtune.run.data.prepared import PreparedData
from tests.tiny_tokenizer import CHAT_ROW, CHATML, CHATML_MARKED, tiny_tokenizer, write_jsonl

TEXTS = [{"text": "yes no"}, {"text": "one two three"}, {"text": "Say yes."}]


class Counted:
    """Counts how often scripts are tokenised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        encode = Encoder.encode

        def counting(encoder: Encoder, rows: Sequence) -> list:
            self.calls += 1
            return encode(encoder, rows)

        monkeypatch.setattr(Encoder, "encode", counting)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture
def keep(tmp_path: Path) -> Callable[..., PreparedData]:
    def prepare_kept(
        path: str, tokenizer: PreTrainedTokenizerFast | None = None, **options: object
    ) -> PreparedData:
        return prepare(path, tokenizer or tiny_tokenizer(), cache_folder=tmp_path / "cache", **options)

    return prepare_kept


def folders(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache").iterdir() if path.is_dir())


def test_a_second_start_reads_no_row(
    tmp_path: Path, counted: Counted, keep: Callable[..., PreparedData], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path, {"prompt": "yes ", "completion": "no"}, {"prompt": "", "completion": "no"})
    first = keep(path)
    caplog.clear()
    second = keep(path, tiny_tokenizer())
    assert counted.calls == 1
    assert list(second) == list(first) and second.summary == first.summary
    assert second.where(1) == f"{path}:2"
    # What there is to know of the rows is said at every start.
    assert first.summary.notes and all(note in caplog.text for note in first.summary.notes)
    os.utime(path)  # a touched file is the same file
    keep(path)
    assert counted.calls == 1


def test_other_content_of_the_same_size_is_prepared_anew(
    tmp_path: Path, keep: Callable[..., PreparedData]
) -> None:
    path = write_jsonl(tmp_path, *TEXTS)
    before, stat = keep(path), os.stat(path)
    write_jsonl(tmp_path, *TEXTS[:2], {"text": "Say nay."})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert os.stat(path).st_size == stat.st_size and os.stat(path).st_mtime_ns == stat.st_mtime_ns
    after = keep(path)
    assert before[2] != after[2] and list(after) == list(prepare(path, tiny_tokenizer()))


def test_the_middle_of_a_large_file_changes(
    tmp_path: Path, keep: Callable[..., PreparedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_WHOLE_BYTES", 16)
    monkeypatch.setattr(cache, "_END_BYTES", 8)
    path = write_jsonl(tmp_path, *TEXTS)
    keep(path)
    assert len(folders(tmp_path)) == 1
    keep(path)
    assert len(folders(tmp_path)) == 1
    stat = os.stat(path)
    content = Path(path).read_bytes()
    with open(path, "r+b") as file:  # the same file, ends, size and mtime
        file.write(content.replace(b"two", b"six"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert list(keep(path)) == list(prepare(path, tiny_tokenizer()))
    assert len(folders(tmp_path)) == 2


@pytest.mark.parametrize(
    ("tokenizer", "options"),
    [
        (tiny_tokenizer(CHATML_MARKED), {}),
        (tiny_tokenizer(CHATML.replace("\n", " ")), {}),
        (tiny_tokenizer(adds_bos=True), {}),
        (tiny_tokenizer(), {"chat_template": CHATML.replace("\n", " ")}),
        (tiny_tokenizer(), {"max_length": 2047}),
        (tiny_tokenizer(), {"overlong": "truncate"}),
        (tiny_tokenizer(), {"learn_on": "all"}),
        (tiny_tokenizer(), {"bad_rows": "skip"}),
        (tiny_tokenizer(), {"format": "messages"}),
    ],
    ids=lambda value: next(iter(value), "same options") if isinstance(value, dict) else "",
)
def test_whatever_decides_the_ids_decides_the_place(
    tmp_path: Path, keep: Callable[..., PreparedData], tokenizer: PreTrainedTokenizerFast, options: dict
) -> None:
    path = write_jsonl(tmp_path, CHAT_ROW)
    keep(path)
    assert list(keep(path, tokenizer, **options)) == list(prepare(path, tokenizer, **options))
    assert len(folders(tmp_path)) == 2


def test_a_template_is_known_by_its_content(tmp_path: Path, keep: Callable[..., PreparedData]) -> None:
    path, template = write_jsonl(tmp_path, CHAT_ROW), tmp_path / "chat.jinja"
    template.write_text(CHATML)
    first = keep(path, chat_template=str(template))
    template.write_text(CHATML.replace("\n", " "))
    assert keep(path, chat_template=str(template))[0] != first[0]


def test_weights_and_files_decide_the_place(tmp_path: Path, keep: Callable[..., PreparedData]) -> None:
    path = write_jsonl(tmp_path, *TEXTS)
    more = write_jsonl(tmp_path, *TEXTS, name="more.jsonl")
    counts = [len(keep(sources)) for sources in (path, {path: 2.0}, [path, more], [more, path])]
    assert counts == [3, 6, 6, 6]
    assert len(folders(tmp_path)) == 4


def test_a_template_that_writes_the_date_is_rendered_every_day(
    tmp_path: Path, keep: Callable[..., PreparedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:
            return date(2050, 1, 1)

    dated = tiny_tokenizer("{{ strftime_now('%d %b %Y') }}" + CHATML)
    path = write_jsonl(tmp_path, CHAT_ROW)
    for tokenizer, places in [(tiny_tokenizer(), 1), (dated, 3)]:
        keep(path, tokenizer)
        with monkeypatch.context() as tomorrow:
            tomorrow.setattr(cache, "date", Tomorrow)
            keep(path, tokenizer)
        assert len(folders(tmp_path)) == places


@pytest.mark.parametrize("name", ["ids.int32", "learned.uint8", "index.int64", "account.json"])
@pytest.mark.parametrize("damage", ["shorter", "missing"])
def test_damaged_rows_are_prepared_again_and_it_is_said(
    tmp_path: Path,
    keep: Callable[..., PreparedData],
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: str,
) -> None:
    path = write_jsonl(tmp_path, *TEXTS)
    want = list(keep(path))
    file = folders(tmp_path)[0] / name
    file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:-4])
    with caplog.at_level(logging.WARNING, logger="airtune"):
        assert list(keep(path)) == want
    assert "are damaged" in caplog.text and name in caplog.text.replace("Expecting", "account.json")
    caplog.clear()
    assert list(keep(path)) == want
    assert "damaged" not in caplog.text and len(folders(tmp_path)) == 1


def test_a_preparation_that_fails_leaves_no_rows(tmp_path: Path, keep: Callable[..., PreparedData]) -> None:
    path = write_jsonl(tmp_path, *TEXTS, {"text": 7})
    with pytest.raises(ValueError, match=r"rows.jsonl:4: text"):
        keep(path)
    with pytest.raises(ValueError, match="no row is left"):
        keep(write_jsonl(tmp_path, {"text": ""}))
    assert folders(tmp_path) == []


def test_a_file_that_grows_while_it_is_read_is_an_error(
    tmp_path: Path, keep: Callable[..., PreparedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path, *TEXTS)
    encode = Encoder.encode

    def appending(encoder: Encoder, rows: Sequence) -> list:
        with open(path, "a") as file:
            file.write(json.dumps(TEXTS[0]) + "\n")
        return encode(encoder, rows)

    monkeypatch.setattr(Encoder, "encode", appending)
    with pytest.raises(ValueError, match="changed while they were read"):
        keep(path)
    assert folders(tmp_path) == []


def test_what_was_used_longest_ago_is_dropped_while_little_is_free(
    tmp_path: Path, counted: Counted, keep: Callable[..., PreparedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_jsonl(tmp_path, *TEXTS, name=f"{i}.jsonl") for i in range(5)]
    kept = [keep(path) for path in paths[:4]]
    locks = sorted((tmp_path / "cache").glob(".*.lock"), key=lambda lock: lock.stat().st_mtime_ns)
    killed = locks[1].with_suffix(".partial")
    shutil.copytree(locks[1].with_name(locks[1].name[1:-5]), killed)
    for when, i in enumerate((1, 2, 0, 3)):
        os.utime(locks[i], (when, when))
    one_nbytes = cache._nbytes(folders(tmp_path)[0])
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * one_nbytes + 100))
    with cache._alone(locks[2]):  # being prepared again, as it were
        os.utime(locks[2], (1, 1))
        fresh = keep(paths[4])
    assert not killed.exists() and len(folders(tmp_path)) == 3
    counted.calls = 0
    assert list(keep(paths[4])) == list(fresh) and counted.calls == 0
    assert list(keep(paths[2])) == list(kept[2]) and counted.calls == 0
    # Dropped, and still there for the run that has them open.
    assert list(kept[1]) == list(keep(paths[1])) and counted.calls == 1


def test_two_that_want_the_same_rows_prepare_them_once(
    tmp_path: Path, counted: Counted, keep: Callable[..., PreparedData]
) -> None:
    path = write_jsonl(tmp_path, *TEXTS)
    got: list[PreparedData] = []
    threads = [threading.Thread(target=lambda: got.append(keep(path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 3 and list(got[0]) == list(got[1]) == list(got[2])
    assert counted.calls == 1


def test_where_nothing_can_be_kept_rows_are_prepared_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A home that cannot be written to, as in many containers, is no reason not to train."""
    (tmp_path / "file").touch()
    rows = write_jsonl(tmp_path, {"text": "yes"})
    assert len(prepare(rows, tiny_tokenizer(), cache_folder=tmp_path / "file" / "x")) == 1
    assert "rows are prepared for this run alone: they cannot be kept ([Errno 20]" in caplog.text
