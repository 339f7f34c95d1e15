"""Rows of Arrow tables: Parquet files, and data sets of the `datasets` library.

A column of structs has one set of fields for all of its rows. Where rows differed (one tool takes a city,
another a number), every row gets the fields of all others, filled with null:

    written    {"arguments": {"city": "Bern"}}               {"arguments": {"n": 3}}
    stored     {"arguments": {"city": "Bern", "n": null}}    {"arguments": {"city": null, "n": 3}}

A model that is trained on this learns to name every argument of every tool. So nulls inside a struct are left
out; those who need a null there have JSON. Rows are numbered, as tables have no lines; the first is row 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow
import pyarrow.parquet

from airtune.run.data.files import hub_parts
from airtune.run.data.records import Row

_BATCH_ROWS = 64  # rows may be a megabyte each, and a batch of them is held


def read_parquet(name: str) -> Iterator[Row]:
    """Reads a row group at a time."""
    try:
        with pyarrow.parquet.ParquetFile(name) as file:
            yield from _rows(name, file.iter_batches(batch_size=_BATCH_ROWS))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{name}: no Parquet file that can be read ({error})") from error


def read_saved(name: str) -> Iterator[Row]:
    """Reads a folder that `Dataset.save_to_disk` wrote; the files are mapped, not loaded."""
    import datasets  # a second, and most runs read files

    try:
        yield from _rows(name, datasets.load_from_disk(name).with_format("arrow").iter(_BATCH_ROWS))
    except (pyarrow.ArrowException, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: no data set that can be read ({error})") from error


def read_hub(name: str) -> Iterator[Row]:
    """Downloads a data set of the hub once, into the cache of `datasets`, and reads it from there."""
    import datasets

    path, config, split = hub_parts(name)
    try:
        dataset = datasets.load_dataset(path, config, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: the data set cannot be had from the hub ({error})") from error
    yield from _rows(name, dataset.with_format("arrow").iter(_BATCH_ROWS))


def _rows(name: str, batches: Iterable[pyarrow.RecordBatch | pyarrow.Table]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for fields in batch.to_pylist():
            number += 1
            yield Row(f"{name}: row {number}", {key: _without_nulls(value) for key, value in fields.items()})


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
