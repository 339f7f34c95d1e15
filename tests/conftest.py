"""Fixtures for every test."""

from __future__ import annotations

import pytest

from tests.sim import load_sim, sim_fixture  # noqa: F401


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the simulated accelerator before any backward pass: PyTorch lays its queues out at the first."""
    if any("sim" in getattr(item, "fixturenames", ()) for item in session.items):
        load_sim()
