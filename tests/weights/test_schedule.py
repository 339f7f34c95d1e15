"""The route, driven as a residency drives it, over bare numbers: what is read, when, and in place of what."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from airtune.weights.schedule import Direction, Route, Stop

Steps = Sequence[tuple[int, Direction]]


class Places:
    """A residency without weights: obeys the route and counts.

    Attributes:
        reads: layers that were read.
        late: visits that found their layer absent, so that they had to wait for a read from beginning to end.
    """

    def __init__(self, count: int, places: int) -> None:
        self.count, self.places = count, places
        self.route = Route(count)
        self.present: dict[int, None] = {}
        self.reads = self.late = 0

    def visit(self, index: int, direction: Direction) -> None:
        self.route.arrive(Stop(index, direction))
        if index not in self.present:
            self.late += 1
            full = len(self.present) >= self.places
            self._read(index, self.route.last_needed(self.present) if full else None)
        if len(self.present) < self.places:
            absent = [i for i in range(self.count) if i not in self.present]
            if (coming := self.route.first_needed(absent)) is not None:
                self._read(coming, None)
        elif (choice := self.route.replace(self.present, index)) is not None:
            self._read(*choice)
        assert index in self.present, "the visited layer was dropped"

    def _read(self, index: int, drop: int | None) -> None:
        assert index not in self.present and 0 <= index < self.count
        if drop is not None:
            del self.present[drop]
        self.present[index] = None
        assert len(self.present) <= self.places
        self.reads += 1

    def run(self, steps: Steps) -> tuple[int, int]:
        """(reads, late) of these visits."""
        reads, late = self.reads, self.late
        for index, direction in steps:
            self.visit(index, direction)
        return self.reads - reads, self.late - late


def forward(*order: int) -> list[tuple[int, Direction]]:
    return [(index, "forward") for index in order]


def both_ways(*order: int) -> list[tuple[int, Direction]]:
    return [*forward(*order), *((index, "backward") for index in reversed(order))]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 12])
def test_a_training_step_reads_what_is_not_kept_at_its_two_turns(count: int) -> None:
    for places in range(1, count + 3):
        run = Places(count, places)
        first, *others = [run.run(both_ways(*range(count))) for _ in range(5)]
        assert first == (max(count, 2 * count - places), count + max(0, count - 1) if places == 1 else 1)
        reads = max(0, 2 * count - 2 * places)
        assert [read for read, _ in others] == [reads] * 4
        # With one place nothing can be read ahead: every read is waited for.
        assert [late for _, late in others] == [reads if places == 1 else 0] * 4


@pytest.mark.parametrize("count", [2, 5, 10])
def test_forward_passes(count: int) -> None:
    for places in range(1, count + 1):
        run = Places(count, places)
        passes = [run.run(forward(*range(count))) for _ in range(6)]
        assert passes[0][0] == count
        if places == 1:
            assert passes[1:] == [(count, count)] * 5
        else:
            assert sum(late for _, late in passes[2:]) == 0
            assert all(reads <= count for reads, _ in passes[2:])
        if places == count:
            assert passes[1:] == [(0, 0)] * 5


@pytest.mark.parametrize("places", [2, 3, 5])
def test_evaluation_between_training_steps_is_surprised_once_each_way(places: int) -> None:
    run, train, evaluate = Places(10, places), both_ways(*range(10)), forward(*range(10))
    for _ in range(3):
        run.run(train)
    in_evaluation = [run.run(evaluate) for _ in range(4)]
    in_training = [run.run(train) for _ in range(4)]
    assert [late for _, late in in_evaluation] == [0, 1, 0, 0], "the turn was expected once more"
    assert [late for _, late in in_training] == [0, 0, 0, 0], "its last layer is still there"
    assert [reads for reads, _ in in_training[1:]] == [20 - 2 * places] * 3


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 3), (1, 2, 3)])
@pytest.mark.parametrize("places", [1, 2, 3, 4])
def test_a_layer_that_is_skipped_is_not_read_again(order: tuple[int, ...], places: int) -> None:
    run = Places(4, places)
    run.run(both_ways(*order) * 2)  # the second time knows the way, and ends as it will always end
    steps = [run.run(both_ways(*order)) for _ in range(4)]
    reads = max(0, 2 * len(order) - 2 * places)
    assert steps == [(reads, reads if places == 1 else 0)] * 4


@pytest.mark.parametrize(("places", "reads"), [(1, 10), (3, 2), (4, 0)])
def test_layers_that_are_visited_twice(places: int, reads: int) -> None:
    """0 (1 2) (1 2) 3 there and back. One place: a read a visit but for the two turns."""
    run, step = Places(4, places), both_ways(0, 1, 2, 1, 2, 3)
    run.run(step)
    assert [run.run(step)[0] for _ in range(4)] == [reads] * 4


def test_the_same_layer_again_and_again() -> None:
    run = Places(3, 2)
    assert run.run(forward(1, 1, 1, 1)) == (2, 1)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_the_visited_layer_is_there(seed: int) -> None:
    """`Places` checks every visit. Runs of both directions, repeats and jumps; budgets from one to all."""
    choice = random.Random(seed)
    count = choice.randint(1, 9)
    run = Places(count, choice.randint(1, count + 1))
    for _ in range(40):
        order = choice.choice(
            [range(count), choice.sample(range(count), count), choice.choices(range(count))]
        )
        run.run(choice.choice([forward, both_ways])(*order))
    assert run.reads <= 2 * 40 * 2 * count


@pytest.mark.parametrize("seed", range(5))
def test_places_may_change_in_mid_run(seed: int) -> None:
    choice = random.Random(seed)
    run, step = Places(8, 2), both_ways(*range(8))
    run.run(step * 2)
    for places in (3, 5, 8):
        run.places = places
        run.run(step[: choice.randrange(len(step))] + step)
    run.run(step)
    assert run.run(step) == (0, 0)


def test_before_anything_was_learned() -> None:
    route = Route(3)
    assert list(route.ahead()) == [] and route.first_needed([0, 1, 2]) is None
    route.arrive(Stop(1, "forward"))
    following = [(stop.index, stop.direction[0]) for stop in route.ahead()]
    assert following[:6] == [(2, "f"), (2, "b"), (1, "b"), (0, "b"), (0, "f"), (1, "f")]
    assert (route.first_needed([0]), route.first_needed([])) == (0, None)


def test_nothing_is_dropped_for_a_layer_that_is_needed_later() -> None:
    route = Route(4)
    route.arrive(Stop(0, "forward"))
    assert route.replace([0], current=0) is None, "the only layer is the current one"
    assert route.replace([0, 1], current=0) is None, "1 comes before any that is absent"
    assert route.replace([0, 3], current=0) == (1, 3)
    assert route.replace([0, 1, 2, 3], current=0) is None, "nothing is absent"


def test_what_is_never_needed_goes_first() -> None:
    run = Places(4, 3)
    for _ in range(3):
        run.run(forward(0, 1, 2))
    run.route.arrive(Stop(0, "forward"))
    assert run.route.last_needed([1, 3, 2]) == 3
    assert run.route.replace([0, 2, 3], current=0) == (1, 3)


@pytest.mark.parametrize("places", [2, 50, 99])
def test_deciding_is_cheap_beside_a_layer(places: int) -> None:
    """100 layers: a visit's decisions take about a millisecond, its weights tens of them."""
    run, step = Places(100, places), both_ways(*range(100))
    run.run(step * 2)
    started = time.process_time()
    run.run(step)
    assert (time.process_time() - started) / len(step) < 0.01


def test_memory_of_the_past_does_not_grow() -> None:
    run, step = Places(6, 2), both_ways(*range(6))
    run.run(step * 2)
    known = len(run.route._follows)
    run.run(step * 50)
    assert len(run.route._follows) == known
    choice = random.Random(0)
    run.run([(choice.randrange(6), "forward") for _ in range(5000)])
    assert len(run.route._follows) <= (2 * 6) ** 2 + 1


@pytest.mark.parametrize("places", [4, 6, 9])
def test_forward_passes_keep_what_fits(places: int) -> None:
    run = Places(10, places)
    passes = [run.run(forward(*range(10))) for _ in range(40)]
    assert sum(late for _, late in passes[2:]) == 0
    assert sum(reads for reads, _ in passes[20:]) / 20 <= 10 - (places - 2)
