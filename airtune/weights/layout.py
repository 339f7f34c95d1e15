"""Which checkpoint tensors make which module tensor.

A checkpoint's layout is not the module's: a file may hold one 2-D matrix per expert where the module holds
one fused 3-D parameter, one fused matrix where the module holds three, or the same tensor under an older
name. transformers knows all of it (`get_model_conversion_mapping`), but applies it to a whole model at
once. Here the same rules are applied once to names and shapes alone, on the meta device, and give a plan
that a single layer can be loaded by, twice a step, for days.

Most conversions only move bytes: identity, stacking experts, concatenating along an outer dimension,
chunking. For these the plan holds where each byte range lands (`Piece`), so that a file read is the whole
conversion: a fused [128, 2x768, 2048] gate/up parameter is 256 reads into place, with nothing stacked or
copied afterwards. Everything rarer (a transpose, a rope permutation) keeps the library's own converter and
costs a copy.

A weight that is stored packed has several sources too, and its converter begins with a quantizer's operation.
It is not made while the layer is brought, but whenever it is used: see `decode`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.loading_report import LoadStateDictInfo

from airtune.weights.header import CheckpointError, StoredTensor, listed
from airtune.weights.packed.decode import (
    Scheme,
    Source,
    decodes,
    is_packed,
    read_described,
    refuse_undecoded,
    without_decoding,
)
from airtune.weights.pieces import Piece, trace_pieces
from airtune.weights.plans import Conversion, TensorPlan
from airtune.weights.stand_in import StandIn


def plan_weights(
    model: PreTrainedModel, checkpoint: Mapping[str, StoredTensor], scheme: Scheme | None = None
) -> dict[str, TensorPlan]:
    """{module tensor name: plan} for every persistent tensor of `model` (on meta, its buffers aside).

    Args:
        scheme: how the checkpoint's weights are packed, if they are (`schemes.take_scheme`).

    Raises:
        CheckpointError: a module tensor has no source, a shape differs, a packed weight lacks its scale, or a
            checkpoint tensor is neither used nor on the model's own ignore list.
    """
    wanted = model.state_dict()
    conversions, unused = _group_sources(model, checkpoint, wanted, scheme)
    made: dict[str, TensorPlan] = {}
    wrong_shape = []
    for conversion in conversions:
        outputs, pieces = conversion.outline(), _pieces(conversion)
        for name, value in outputs.items():
            there = tuple(value.shape)
            if name not in wanted:
                unused.append((name, conversion.sources[0][0]))
            elif there != (here := tuple(wanted[name].shape)):
                wrong_shape.append(f"{name}: {there} in the checkpoint, {here} in the model")
            else:
                made[name] = TensorPlan(name, wanted[name].dtype, here, conversion, name, pieces.get(name))
    _follow_ties(model, wanted, made)
    _check_complete(model, wanted, made, unused, wrong_shape)
    return {name: made[name] for name in wanted if name in made}


def _pieces(conversion: Conversion) -> dict[str, tuple[Piece, ...]]:
    sources = [(pattern, stored) for _, pattern, stored in conversion.sources]
    if conversion.packed or len({stored.dtype for _, stored in sources}) > 1:
        return {}
    return trace_pieces(conversion.target, sources, conversion.converter, conversion.asked.config)


def _group_sources(
    model: PreTrainedModel,
    checkpoint: Mapping[str, StoredTensor],
    wanted: dict[str, torch.Tensor],
    scheme: Scheme | None,
) -> tuple[list[Conversion], list[tuple[str, str]]]:
    """Rename every checkpoint key as transformers would, and gather the keys that share a converter.

    Also returns (new name, key) of those that the model has no place for.
    """
    mapping = get_model_conversion_mapping(model)
    if scheme is not None:
        mapping = scheme.update_weight_conversions(mapping, model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    groups: dict[str, tuple[WeightConverter | None, list[Source]]] = {}
    unused = []
    for key in sorted(checkpoint, key=dot_natural_key):
        if scheme is not None and key.rpartition(".")[2] in scheme.unread:
            continue
        target, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if target not in wanted and key in wanted:  # it was stored under the newer name
            target, pattern = key, None
        if target not in wanted:
            unused.append((target, key))
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        groups.setdefault(target, (converter, []))[1].append((key, pattern or key, checkpoint[key]))
    asked = StandIn(model.config, wanted)
    made = [
        _conversion(target, sources, converter, scheme, asked)
        for target, (converter, sources) in groups.items()
    ]
    return made, unused


def _conversion(
    target: str,
    sources: list[Source],
    converter: WeightConverter | None,
    scheme: Scheme | None,
    model: StandIn,
) -> Conversion:
    asked = model
    if scheme is not None and converter is not None and decodes(converter):
        if is_packed(scheme, sources):
            asked = StandIn(model.config, model.wanted, read_described(scheme, sources))
        else:  # stored as it is, among others that are packed
            converter = without_decoding(converter)
            sources = [(key, pattern if converter else key, stored) for key, pattern, stored in sources]
    _check_sources(target, converter, sources)
    if asked is model:
        refuse_undecoded(target, model.get_parameter(target).dtype, sources)
    return Conversion(target, tuple(sources), converter, asked)


def _check_sources(target: str, converter: WeightConverter | None, sources: Sequence[Source]) -> None:
    """One tensor for one place; and where a list is stacked, every number of it, for every part.

    transformers would leave a tensor out that its converter has no use for, and shift a list with a gap, both
    without a word.
    """
    known = () if converter is None else converter.source_patterns
    if len(sources) > 1 and any(pattern not in known for _, pattern, _ in sources):
        keys = [key for key, _, _ in sorted(sources, key=lambda source: source[1] in known)]
        raise CheckpointError(f"the checkpoint has more than one tensor for {target}: {listed(keys)}")
    numbers: dict[str, dict[int, str]] = {}  # {pattern: {number: key}}
    for key, pattern, _ in sources:
        if "*" in pattern:
            number = source_number(key, pattern)
            if number is None:
                return  # a pattern that means more than a number: the shapes must tell
            numbers.setdefault(pattern, {})[number] = key
    count = 1 + max((number for keys in numbers.values() for number in keys), default=-1)
    missing = [
        _renumbered(keys[min(keys)], pattern, number)
        for pattern, keys in numbers.items()
        for number in range(count)
        if number not in keys
    ]
    if missing:
        raise CheckpointError(
            f"{target} is made of at least {count} tensors of a kind, and the checkpoint is missing "
            f"{listed(missing)}. Check that every shard was downloaded."
        )


def _follow_ties(
    model: PreTrainedModel, wanted: Mapping[str, torch.Tensor], made: dict[str, TensorPlan]
) -> None:
    """A tied tensor is stored once: both names get the sources of the one that is there."""
    for pair in model.all_tied_weights_keys.items():
        for absent, there in (pair, pair[::-1]):
            if absent not in made and there in made:
                made[absent] = replace(made[there], name=absent, dtype=wanted[absent].dtype)


def _check_complete(
    model: PreTrainedModel,
    wanted: Mapping[str, torch.Tensor],
    made: Mapping[str, object],
    unused: Sequence[tuple[str, str]],
    wrong_shape: Sequence[str],
) -> None:
    renamed = {name for name, _ in unused}
    info = LoadStateDictInfo(set(wanted) - set(made), renamed, set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(info)  # drops what its authors say may be absent or extra
    missing = sorted(info.missing_keys)
    unexpected = list(dict.fromkeys(key for name, key in unused if name in info.unexpected_keys))
    problems = [
        f"{what}: {listed(names, limit=8)}"
        for what, names in (
            ("the model's tensors without a source in the checkpoint", missing),
            ("checkpoint tensors that the model has no place for", unexpected),
            ("different shapes", wrong_shape),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit {type(model).__name__}: {'; '.join(problems)}. "
            "Check that config.json and the weights belong together and that every shard was downloaded."
        )


def source_number(key: str, pattern: str) -> int | None:
    """The number that stands in `key` for the `*` of its source pattern: an expert's index."""
    found = _numbered(pattern).search(key) if "*" in pattern else None
    return None if found is None else int(found[1])


@cache
def _numbered(pattern: str) -> re.Pattern[str]:
    """A source pattern, with its `*` as a number."""
    return re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))


def _renumbered(key: str, pattern: str, number: int) -> str:
    """The key that is like `key`, with another number in the place of the pattern's `*`."""
    found = _numbered(pattern).search(key)
    assert found is not None
    return key[: found.start(1)] + str(number) + key[found.end(1) :]
