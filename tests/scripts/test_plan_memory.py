"""What the recipes say about memory is what the script counts."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("plan_memory", ROOT / "scripts" / "plan_memory.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plan_memory", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss_120b", "qwen3_235b"])
def test_the_recipe_says_what_is_counted(
    name: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main([name])
    heading, row = capsys.readouterr().out.splitlines()[:2]
    cells = dict(zip(re.split(r"\s{2,}", heading.strip()), re.split(r"\s{2,}", row.strip()), strict=True))
    recipe = " ".join((ROOT / "recipes" / f"{name}_sft.yaml").read_text().replace("\n# ", " ").split())
    count, size = cells["experts"].split(" x ")
    assert (
        f"{cells['layers']} layers of {cells['GB a layer']} GB beside {count} experts of {size} each"
        in recipe
    )
    layers_experts = cells["GB a layer's experts"]
    assert f"experts of one layer ({layers_experts} GB)" in recipe
    assert f"reads all {cells['GB of all layers']} GB from the disk twice" in recipe
    assert f"{float(cells['GB adapter state']):.1f} GB for the adapter" in recipe
    assert f"{float(cells['GB window']):.1f} GB for experts" in recipe


def test_an_unknown_model_is_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["gpt_oss"])
    assert "unknown models ['gpt_oss']; known: deepseek_v3" in capsys.readouterr().err
