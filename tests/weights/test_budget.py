"""Slots from bytes."""

from __future__ import annotations

import pytest

from airtune.weights.budget import SlotBudget


def test_without_a_limit_two_layers_at_a_time() -> None:
    budget = SlotBudget(count=8, slot_nbytes=100, nbytes=None)
    assert budget.first() == budget.settled(budget.left(10**9)) == 2
    assert SlotBudget(count=1, slot_nbytes=100, nbytes=None).first() == 1


@pytest.mark.parametrize(("nbytes", "slots"), [(150, 1), (349, 1), (350, 2), (10_000, 2)])
def test_the_first_step_takes_at_most_two(nbytes: int, slots: int) -> None:
    assert SlotBudget(count=8, slot_nbytes=100, nbytes=nbytes, fixed_nbytes=50).first() == slots


def test_too_little_says_what_is_needed_and_why() -> None:
    needed = "limited to 149 bytes and at least 150 are needed: 100 for the largest"
    with pytest.raises(ValueError, match=needed):
        SlotBudget(count=8, slot_nbytes=100, nbytes=149, fixed_nbytes=50).first()


def test_what_a_step_leaves_becomes_slots() -> None:
    budget = SlotBudget(count=8, slot_nbytes=100, nbytes=1000, fixed_nbytes=40)
    assert budget.left(working_nbytes=200) == 1000 - 220 - 20
    assert budget.settled(760) == 7
    assert budget.settled(budget.left(working_nbytes=2000)) == 1, "one is always needed"
    assert budget.settled(10**6) == 8, "never more than layers"


def test_a_layer_without_bytes_of_its_own() -> None:
    """On the CPU a layer may be nothing but views of the file."""
    assert SlotBudget(count=4, slot_nbytes=0, nbytes=10).first() == 2
