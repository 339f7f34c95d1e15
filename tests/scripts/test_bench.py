"""The benchmarks run, on toys, and print their tables. Nothing is said about times."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import zoo
from tests.sim import Simulator

SCRIPTS = Path(__file__).parents[2] / "scripts"
Run = Callable[..., list[list[str]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A script's main, in this process; its output as the cells of each line, which two spaces separate."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # the scripts set it, and this puts it back

    def run_script(name: str, *options: object) -> list[list[str]]:
        importlib.import_module(name).main([str(option) for option in options])
        lines = capsys.readouterr().out.splitlines()
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]

    return run_script


def test_train(run: Run, tmp_path: Path) -> None:
    folder, figures = zoo.make("qwen3_5__vl", tmp_path / "model"), tmp_path / "figures.json"
    options = ["--tokens", 16, 32, "--seq", 16, "--steps", 2, "--threads", 1, "--rank", 2]
    head, *rows, _ = run("bench_train", "--checkpoint", folder, *options, "--json", figures)
    assert head[:3] == ["tokens/step", "s/step", "ratio"]
    assert [row[:2] for row in rows] == [
        [tokens, kind] for tokens in ("16", "32") for kind in ("airtune", "resident")
    ]
    sizes = json.loads(figures.read_text())["sizes"]
    assert len(sizes["32"]["ratio"]) == 2
    for size in sizes.values():
        assert size["airtune"]["steps"][-1]["bytes_read"] > 0 == size["resident"]["steps"][-1]["bytes_read"]
        # Libraries alone are 100 MB.
        assert all(10**8 < size[kind]["peak"]["anonymous"] < 10**10 for kind in ("airtune", "resident"))


def test_overlap(run: Run, tmp_path: Path) -> None:
    folder, figures = zoo.make("llama", tmp_path / "model"), tmp_path / "figures.json"
    options = ["--ratios", 2, "--places", 1, "--seq", 8, "--steps", 1, "--threads", 1, "--rank", 2]
    head, row, _ = run("bench_overlap", "--checkpoint", folder, *options, "--json", figures)
    assert head[:2] == ["IO:compute", "places"] and row[:2] == ["2.0", "1"]
    ((pair,),) = (setting["pairs"] for setting in json.loads(figures.read_text())["measured"])
    braked = pair["braked"]
    # The brake holds: reading takes what it must, and only so much of it can hide behind 8 visits.
    assert braked["step_s"] > braked["bytes_read"] / pair["rate"]
    assert [tuple(visit) for visit in braked["visits"]] == [
        *(("forward", index) for index in range(4)),
        *(("backward", index) for index in reversed(range(4))),
    ]


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_gpu_elsewhere(run: Run, tmp_path: Path, device: str) -> None:
    figures = tmp_path / "figures.json"
    run("bench_gpu", "--device", device, "--tiny", "--json", figures)
    tables = json.loads(figures.read_text())
    assert tables.keys() == {"correct", "memory", "overlap", "speed"}
    exact, rounded = tables["correct"]
    assert float(exact["worst gradient"]) < 1e-5
    # In bf16 the streamed model is no farther from the truth than the resident one.
    assert float(rounded["from fp32"]) < 2 * float(rounded["resident from fp32"])


def test_device_memory(run: Run, sim: Simulator, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run("measure_device_memory", "--tiny", "--seq", 16, "--rank", 2, "--json", figures)
    windows = json.loads(figures.read_text())["windows"]
    assert len(windows) == 4 + 1 + 4 + 1, "layers forward, head, layers backward, optimizer"
    (place,) = {window["places"] for window in windows}
    for window in windows:
        parts = ("places", "adapter", "gradients", "optimizer", "kept", "work")
        assert window["peak"] == sum(window[part] for part in parts)
        assert min(window[part] for part in parts) >= 0
        assert window["optimizer"] == 2 * window["adapter"] > 0
    assert windows[-1]["gradients"] == windows[-1]["adapter"]
    assert place < max(window["peak"] for window in windows) < 20 * place


def test_a_contender_that_ends_is_an_error(run: Run) -> None:
    """`run` has put the scripts on the path."""
    bench = importlib.import_module("_bench")
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        bench.Contender([sys.executable, "-c", "raise SystemExit(3)"], threads=1)
