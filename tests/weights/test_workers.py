"""Threads are on the card that they bring weights to."""

from __future__ import annotations

import pytest
import torch

from airtune.weights.workers import workers


def test_the_current_device_is_the_one_they_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        with workers(1, "test", device) as pool:
            assert pool.submit(int).result() == 0
    assert chosen == [torch.device("cuda", 1)]
