"""All that enters and leaves a layer is in the lists of leaves: results, containers, recorded values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from airtune.autograd.layer_run import Layout, Lists, NoRecording, apply_changes, blank, run_layer


class Book:
    """A recording that one can look at: hooks append to `page`."""

    def __init__(self, page: Lists | None = None) -> None:
        self.page = page

    def current(self) -> Lists | None:
        return self.page

    @contextmanager
    def replaced(self, lists: Lists | None) -> Iterator[None]:
        before, self.page = self.page, lists
        try:
            yield
        finally:
            self.page = before


def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Tensor], Layout, list[Any]]:
    leaves, spec = tree_flatten((args, kwargs))
    made, layout = run_layer(forward, leaves, spec, NoRecording(), None)
    return made, layout, leaves


def through(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward(*args, **kwargs)` by way of the leaves, with what it changed written back."""
    made, layout, leaves = run(forward, *args, **kwargs)
    output, changed, recorded = layout.rebuild(made, leaves)
    apply_changes(args, kwargs, changed, recorded, None)
    return output


X = torch.arange(6.0).view(2, 3)


# --- results ------------------------------------------------------------------------------------------------


def test_a_nested_result_comes_back_in_its_shape() -> None:
    def forward(x: Tensor, *, scale: float) -> Any:
        return (x * scale, {"a": [x + 1, None], "b": "text"}, 7)

    output = through(forward, X, scale=2.0)
    assert torch.equal(output[0], 2 * X) and torch.equal(output[1]["a"][0], X + 1)
    assert output[1]["a"][1] is None and output[1]["b"] == "text" and output[2] == 7


def test_new_tensors_are_listed_in_order_and_can_be_exchanged() -> None:
    made, layout, leaves = run(lambda x: {"first": x + 1, "second": (x + 2,)}, X)
    assert [int(t[0, 0]) for t in made] == [1, 2]
    output, changed, recorded = layout.rebuild([torch.zeros(1), torch.ones(1)], leaves)
    assert (output["first"].item(), output["second"][0].item()) == (0, 1)
    assert changed == {} and recorded == []


def test_an_input_handed_through_is_the_callers_own() -> None:
    device_x, callers_x = X.clone(), X.clone()
    leaves, spec = tree_flatten(((device_x,), {}))
    made, layout = run_layer(lambda x: (x, x * 2), leaves, spec, NoRecording(), None)
    assert len(made) == 1
    output, _, _ = layout.rebuild(made, [callers_x])
    assert output[0] is callers_x


def test_a_view_of_an_input_is_a_new_tensor() -> None:
    made, _, _ = run(lambda x: x[:, :2], X)
    assert len(made) == 1


def test_one_tensor_in_two_places() -> None:
    def forward(x: Tensor) -> Any:
        y = x + 1
        return y, [y]

    first, (second,) = through(forward, X)
    assert torch.equal(first, X + 1) and torch.equal(second, X + 1)


def test_a_result_without_tensors() -> None:
    made, layout, leaves = run(lambda x: None, X)
    assert made == [] and layout.rebuild(made, leaves)[0] is None


# --- containers ---------------------------------------------------------------------------------------------


def test_containers_are_untouched_until_the_changes_are_applied() -> None:
    shared: dict[str, Any] = {"old": X}

    def forward(x: Tensor, shared: dict[str, Any]) -> Tensor:
        shared["new"] = x + 1
        return x * 2

    made, layout, leaves = run(forward, X, shared)
    assert shared.keys() == {"old"}
    _, changed, recorded = layout.rebuild(made, leaves)
    apply_changes((X, shared), {}, changed, recorded, None)
    assert shared["old"] is X and torch.equal(shared["new"], X + 1)


def write(shared: dict[str, Any], x: Tensor) -> None:
    shared["new"] = x + 1


def overwrite(shared: dict[str, Any], x: Tensor) -> None:
    shared["old"] = x + 1


def drop(shared: dict[str, Any], x: Tensor) -> None:
    del shared["old"]


def deepen(shared: dict[str, Any], x: Tensor) -> None:
    shared["deep"]["new"] = [x + 1]


@pytest.mark.parametrize("change", [write, overwrite, drop, deepen])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_any_change_of_a_mapping_reaches_the_callers_own(
    kind: type[dict], change: Callable[[dict[str, Any], Tensor], None]
) -> None:
    def start() -> dict[str, Any]:
        return kind({"old": X, "deep": {}, "number": 3})

    def forward(x: Tensor, *, shared: dict[str, Any]) -> Tensor:
        change(shared, x)
        return x * 2

    plain, shared = start(), start()
    forward(X, shared=plain)
    through(forward, X, shared=shared)
    assert type(shared) is kind
    (got, got_spec), (want, want_spec) = tree_flatten(shared), tree_flatten(plain)
    assert got_spec == want_spec
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(got, want, strict=True))


def append(state: list[Any], x: Tensor) -> None:
    state.append(x + 2)


def replace(state: list[Any], x: Tensor) -> None:
    state[0] = x + 2


def clear(state: list[Any], x: Tensor) -> None:
    state.clear()


@pytest.mark.parametrize("change", [append, replace, clear])
def test_any_change_of_a_list_reaches_the_callers_own(change: Callable[[list[Any], Tensor], None]) -> None:
    def forward(x: Tensor, state: list[Any]) -> Tensor:
        change(state, x)
        return x * 2

    plain, state = [X, X], [X, X]
    forward(X, plain)
    through(forward, X, state)
    assert len(state) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(state, plain, strict=True))


def test_what_was_only_read_is_not_written() -> None:
    shared, state = {"a": X}, [X]
    made, layout, leaves = run(lambda x, shared, state: x + shared["a"] + state[0], X, shared, state=state)
    assert len(made) == 1
    assert layout.rebuild(made, leaves)[1] == {}


def test_an_input_that_is_put_into_a_container_stays_the_callers_own() -> None:
    shared: dict[str, Tensor] = {}

    def forward(x: Tensor, shared: dict[str, Tensor]) -> None:
        shared["x"] = x

    through(forward, X, shared)
    assert shared["x"] is X


# --- recorded values ----------------------------------------------------------------------------------------


def test_blank_lists_have_the_lengths_of_the_full_ones() -> None:
    full = {"router": [X, X], "empty": [], "flag": True}
    assert blank(full) == {"router": [None, None], "empty": [], "flag": True}
    assert full["router"] == [X, X]
    assert blank(None) is None


def test_only_what_the_layer_recorded_comes_out() -> None:
    book = Book({"router": [X], "attention": [], "flag": True})
    seen: list[int] = []

    def forward(x: Tensor) -> Tensor:
        assert book.page is not None
        seen.append(len(book.page["router"]))
        book.page["router"].append(x + 1)
        book.page["attention"].extend([x + 2, None])
        return x * 2

    lists = book.current()
    leaves, spec = tree_flatten(((X,), {}))
    made, layout = run_layer(forward, leaves, spec, book, blank(lists))
    assert seen == [1] and len(made) == 3
    assert book.page is lists and lists is not None and len(lists["router"]) == 1, "untouched so far"
    _, changed, recorded = layout.rebuild(made, leaves)
    apply_changes((X,), {}, changed, recorded, lists)
    assert lists["router"][0] is X and torch.equal(lists["router"][1], X + 1)
    assert torch.equal(lists["attention"][0], X + 2) and lists["attention"][1] is None
    assert lists["flag"] is True


def test_the_recording_is_back_after_an_error() -> None:
    book = Book({"router": []})
    page = book.page

    def forward(x: Tensor) -> Tensor:
        raise KeyError

    leaves, spec = tree_flatten(((X,), {}))
    with pytest.raises(KeyError):
        run_layer(forward, leaves, spec, book, blank(page))
    assert book.page is page == {"router": []}
