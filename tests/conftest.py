"""Fixtures for every test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.sim import load_sim, sim_fixture  # noqa: F401


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the simulated accelerator before any backward pass: PyTorch lays its queues out at the first."""
    if any("sim" in getattr(item, "fixturenames", ()) for item in session.items):
        load_sim()
    # What the libraries made when they were imported, half a million objects, is there to stay: to look
    # through it makes each collection take 0.3 s.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands keep for their next start stays in the tests' own folder; the log is pytest's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("airtune.run.console.set_up_logging", lambda: None)
        yield
