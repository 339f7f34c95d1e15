"""The generation benchmark runs, on toys, and drops files as it says. Nothing is said about times."""

from __future__ import annotations

import importlib
import json
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests import zoo

SCRIPTS = Path(__file__).parents[2] / "scripts"
Run = Callable[..., list[list[str]]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # the scripts set it, and this puts it back
    return importlib.import_module("bench_generate")


@pytest.fixture
def run(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> Run:
    """The script's main; its output as the cells of each line, which two spaces separate."""

    def run_script(*options: object) -> list[list[str]]:
        bench.main([str(option) for option in options])
        lines = capsys.readouterr().out.splitlines()
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]

    return run_script


def test_three_ways_side_by_side(run: Run, tmp_path: Path) -> None:
    folder, figures = zoo.make("llama", tmp_path / "model"), tmp_path / "figures.json"
    options = ["--kinds", "airtune", "resident", "accelerate", "--batch", 1, 2, "--prompt", 6, "--tokens", 4]
    options += ["--rounds", 2, "--cold-rounds", 1, "--threads", 1, "--assistant", folder, "--json", figures]
    head, *rows = run("--checkpoint", folder, *options)
    assert head[:3] == ["batch", "first s", "s/token"] and head[-2:] == ["cold s/token", "cold/reading"]
    assert [row[:2] for row in rows[:6]] == [
        [batch, kind] for batch in ("1", "2") for kind in ("airtune", "resident", "accelerate")
    ]
    assert [row[0] for row in rows[8:11]] == ["one token a pass", "lookup", "assistant"]
    kept = json.loads(figures.read_text())
    hot = kept["batch 2"]["hot"]["airtune"]["rounds"][0]
    assert (hot["new"], hot["passes"]) == (8, 4), "two rows of four tokens, one pass each"
    assert all(kept["batch 1"]["hot"][k]["peak"]["anonymous"] > 10**8 for k in ("airtune", "accelerate"))
    guessed = kept["guesses"]["airtune/assistant/0"]["rounds"][0]
    assert guessed["passes"] < guessed["new"], "the model itself guesses right"
    assert not list(tmp_path.glob("accelerate-*")), "copies are gone"


def test_a_contender_with_other_tokens_is_an_error(bench: ModuleType) -> None:
    runs = {kind: bench.Run(rounds=[{"checksum": number}]) for number, kind in enumerate(bench.KINDS[:2])}
    with pytest.raises(SystemExit, match="different tokens"):
        bench.check_equal(runs)


def test_airllm_needs_its_python(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--kinds", "airllm"])
    assert "--airllm-python" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_dropped_files_are_gone_from_memory(bench: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(256)) * 2**14)
    with file.open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    assert memory[5 :: mmap.PAGESIZE] == bytes([5]) * 1024
    bench.drop([file])
    assert bench.share_in_memory([file]) > 0.5, "what is mapped is kept"
    bench.give_back_mapped()
    bench.drop([file])
    if bench.share_in_memory([file]) > 0:
        pytest.skip("this file system keeps its files in memory")
    assert memory[5 :: mmap.PAGESIZE] == bytes([5]) * 1024, "and comes back when it is asked for"
    assert bench.share_in_memory([file]) > 0.5
