"""Stores of packed weights: interrupted, gone on with, cut short, or asked for where something else is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from airtune.durable import alone_in
from airtune.model.quantising import quantise
from airtune.weights.checkpoint import Checkpoint, CheckpointError
from airtune.weights.packed import store
from airtune.weights.packed.manifest import MANIFEST, UNFINISHED, Manifest, check_store, fingerprint
from airtune.weights.packed.packing import Nf4
from tests import zoo

SHARD_NBYTES = 60_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return zoo.make("llama", tmp_path / "source")


def write(source: Path, folder: Path, scheme: str = "nf4") -> Path:
    quantise(source, scheme=scheme, output_dir=folder, shard_nbytes=SHARD_NBYTES)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


class Killed(BaseException):
    """As sudden as a signal."""


def write_until_killed(source: Path, folder: Path, weights: int, patch: pytest.MonkeyPatch) -> None:
    """Packs so many weights and half of another."""
    pack, packed = Nf4.pack, 0

    def killing(self: Nf4, *args: Any) -> Any:
        nonlocal packed
        packed += 1
        for number, chunk in enumerate(pack(self, *args)):
            if packed > weights and number == 3:
                raise Killed
            yield chunk

    with patch.context() as inside:
        inside.setattr(Nf4, "pack", killing)
        with pytest.raises(Killed):
            write(source, folder)


def test_its_files(source: Path, tmp_path: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_text("weights of another format")
    store = write(source, tmp_path / "packed")
    manifest = Manifest.read(store / MANIFEST)
    shards = sorted(store.glob("*.safetensors"))
    assert len(shards) > 3
    assert {file.name for file in store.iterdir()} == {
        *(file.name for file in shards),
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        MANIFEST,
    }
    for name, written in manifest.files.items():
        assert contents(store)[name] == written.sha256
        assert (store / name).stat().st_size == written.nbytes
    assert set(manifest.files) == {*(file.name for file in shards), "model.safetensors.index.json"}
    assert set(manifest.source) == {"config.json", *(file.name for file in source.glob("*.safetensors"))}
    keys = {key for file in shards for key in load_file(file)}
    assert keys == set(json.loads((store / "model.safetensors.index.json").read_text())["weight_map"])
    assert all(stored.offset % stored.dtype.itemsize == 0 for stored in Checkpoint.open(store).values())


def test_a_template_for_tools_comes_along(source: Path, tmp_path: Path) -> None:
    """transformers takes it when a conversation has tools, and the default one where it is not there."""
    named = Path("additional_chat_templates") / "tool_use.jinja"
    (source / named).parent.mkdir()
    (source / named).write_text("{{ tools }}")
    assert (write(source, tmp_path / "packed") / named).read_text() == "{{ tools }}"


@pytest.mark.parametrize("weights", [0, 11, 27])
def test_killed_it_goes_on(
    weights: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bytes, and without writing again what is complete."""
    whole, folder = write(source, tmp_path / "whole"), tmp_path / "packed"
    write_until_killed(source, folder, weights, monkeypatch)
    done = {file: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}
    assert len(done) < len(list(whole.glob("*.safetensors")))
    assert list(folder.glob("*.partial"))
    write(source, folder)
    assert contents(folder) == contents(whole)
    assert {file: file.stat().st_mtime_ns for file in done} == done


def test_a_shard_that_was_damaged_meanwhile_is_written_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, folder = write(source, tmp_path / "whole"), tmp_path / "packed"
    write_until_killed(source, folder, 11, monkeypatch)
    first = folder / sorted(file.name for file in folder.glob("*.safetensors"))[0]
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    write(source, folder)
    assert f"{first} is not as it was written" in caplog.text
    assert contents(folder) == contents(whole)


def test_an_unfinished_store_is_no_model(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_until_killed(source, tmp_path / "packed", 11, monkeypatch)
    with pytest.raises(CheckpointError, match="packed weights that are not finished"):
        check_store(tmp_path / "packed")


def test_it_is_never_both_finished_and_not(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, it would be no model, and no call would go on with it."""
    folder, rename = tmp_path / "packed", os.replace

    def watched(old: Path, new: Path) -> None:
        rename(old, new)
        assert not ((folder / MANIFEST).exists() and (folder / UNFINISHED).exists())

    monkeypatch.setattr(os, "replace", watched)
    write(source, folder)


def test_a_finished_store_is_left_alone(source: Path, tmp_path: Path) -> None:
    folder = write(source, tmp_path / "packed")
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    write(source, folder)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_another_scheme_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_until_killed(source, tmp_path / "packed", 11, monkeypatch)
    with pytest.raises(ValueError, match="of scheme nf4, and int8 is asked for"):
        write(source, tmp_path / "packed", "int8")


def test_a_source_that_was_trained_on_is_refused(source: Path, tmp_path: Path) -> None:
    """The same names, sizes and headers: only the numbers differ."""
    write(source, tmp_path / "packed")
    shutil.rmtree(source)
    zoo.make("llama", source, seed=1)
    with pytest.raises(
        ValueError, match=r"of another source, which differs in model-00001-of-00002.safetensors"
    ):
        write(source, tmp_path / "packed")


def test_another_plan_is_refused(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "packed")
    with pytest.raises(ValueError, match="of another version of airtune"):
        quantise(source, scheme="nf4", output_dir=tmp_path / "packed", shard_nbytes=SHARD_NBYTES // 2)


@pytest.mark.parametrize("place", ["", "config.json"])
def test_a_place_with_something_else_is_refused(source: Path, place: str) -> None:
    with pytest.raises(ValueError, match=rf"source/?{place} is not an empty folder"):
        write(source, source / place)


def test_two_do_not_write_the_same_store(source: Path, tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(ValueError, match="another process is writing into"):
        write(source, tmp_path)
    with pytest.raises(ValueError, match="not an empty folder"):  # it has got as far as that
        write(source, tmp_path)


def test_space_is_looked_for_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(source, tmp_path / "whole")
    needed = sum(
        file.stat().st_size for file in [*whole.glob("*.safetensors"), whole / "generation_config.json"]
    )
    free = needed - 1
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))
    with pytest.raises(ValueError, match=f"{needed} bytes are to be written, and the disk has {free} free"):
        write(source, tmp_path / "packed")
    free = needed
    write(source, tmp_path / "packed")


@pytest.mark.parametrize("fault", ["holds 7 bytes", "is missing"])
def test_a_store_that_was_cut_short(fault: str, source: Path, tmp_path: Path) -> None:
    store = write(source, tmp_path / "packed")
    check_store(store)
    victim = store / sorted(Manifest.read(store / MANIFEST).files)[0]
    victim.write_bytes(b"1234567") if "holds" in fault else victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim.name} {fault}, expected"):
        check_store(store)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"scheme": "nf4", "source": {}, "plan": "", "files": []}'])
def test_a_manifest_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="is not a manifest of packed weights"):
        check_store(tmp_path)


def test_a_folder_that_is_no_store_passes(source: Path) -> None:
    check_store(source)


def test_the_fingerprint_of_a_file_sees_a_change_of_its_numbers(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    content = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
    file.write_bytes(bytes(content.tolist()))
    before = fingerprint(file)
    assert fingerprint(file) == before
    file.write_bytes(bytes((content + 1).tolist()))
    assert fingerprint(file) != before and fingerprint(file)["nbytes"] == before["nbytes"]
