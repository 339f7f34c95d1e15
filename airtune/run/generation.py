"""One call of transformers' `generate` for several prompts, and what became of each.

A token costs one pass over all weights, however many rows take part in it, so prompts are answered together:
padded on the left, with a mask, for every row's last token has to stand in the last column. Everything else
(sampling, beams, stop texts, guessed tokens) is transformers' own.

Three of its defaults would end an answer without a word, and are set here:

    length   without max_new_tokens it stops after 20 tokens. Here it goes on to the model's limit, which is
             said when it is reached, and what is beyond it is refused
    end      generation_config.json often knows only the end token of the pretrained model. The tokenizer's
             own, which training here puts after every answer, ends one too
    padding  a tokenizer may have no pad token. Any id will do where a mask says that it is not there

Shapes: B rows, S padded prompt, T padded prompt and answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from airtune.run.data.prepared import PreparedData
from airtune.run.loading import load_tokenizer

Model: TypeAlias = PreTrainedModel | PeftModel
Finish = Literal["eos", "stop", "length", "interrupted"]

_SAMPLING = ("temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said after a prompt.

    ids: of all new tokens, with the end token. text: without special tokens, and up to the first stop text.
    finish: the model's end token, a stop text, no room for more, or the user.
    """

    ids: list[int]
    text: str
    finish: Finish


@torch.no_grad()
def generate_batch(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    stop: Sequence[str] = (),
    end_ids: Sequence[int] | None = None,
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> list[Answer]:
    """The answers to `prompts` (ids), in their order, made in one batch.

    Args:
        max_new_tokens: of each answer; None for what the model's context has room for.
        stop: texts that end an answer.
        end_ids: tokens that end an answer; None for `default_end_ids` alone.
        options: of transformers' `generate`; what is not among them is as the model's generation_config says.

    Raises:
        ValueError: a prompt with its answer is longer than the model's context, or transformers refuses the
            options.
    """
    ends = default_end_ids(model, tokenizer) if end_ids is None else list(end_ids)
    pad_id = _pad_id(model, tokenizer, ends)
    room = room_for_answers(model, [len(ids) for ids in prompts], max_new_tokens)
    ids_BS, mask_BS = _padded_left(prompts, pad_id)
    was_training = model.training
    model.eval()
    try:
        generated = cast(Any, model).generate(  # transformers' own, also through a PeftModel
            input_ids=ids_BS,
            attention_mask=mask_BS,
            max_new_tokens=room,
            eos_token_id=ends or None,
            pad_token_id=pad_id,
            stop_strings=list(stop) or None,
            tokenizer=tokenizer,
            streamer=streamer,
            num_return_sequences=1,
            return_dict_in_generate=False,
            use_cache=True,  # training switches it off in the model's config
            **options,
        )
    finally:
        model.train(was_training)
    ids_BT = cast(Tensor, generated)
    rows = ids_BT[:, ids_BS.shape[1] :].tolist()
    return [_answer(tokenizer, ids, ends, stop, pad_id, room) for ids in rows]


def context_limit(model: Model) -> int | None:
    """Tokens that the model's positions reach; None where there is no such limit (or none is stated)."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def refuse_beyond_context(model: Model, rows: PreparedData) -> None:
    """ValueError when a row has more tokens than the model's positions reach.

    Learned positions end there; others go on, and what a model makes of them it was never trained for.
    """
    limit, lengths_R = context_limit(model), rows.lengths()
    longest = int(lengths_R.argmax())
    if limit is not None and lengths_R[longest] > limit:
        raise ValueError(
            f"{rows.where(longest)} has {lengths_R[longest]} tokens, and the model's context ends at "
            f"{limit}: set data.max_length={limit} or less, and data.overlong to what becomes of longer rows"
        )


def room_for_answers(model: Model, prompt_tokens: Sequence[int], max_new_tokens: int | None) -> int:
    """How many tokens each answer of a batch may have, `max_new_tokens` if it is given.

    Raises:
        ValueError: that many do not fit into the model's context after the longest prompt.
    """
    limit, longest = context_limit(model), max(prompt_tokens)
    if limit is None and max_new_tokens is None:
        raise ValueError(
            "the model states no limit of its context, so an answer could go on for ever: "
            "set generation.max_new_tokens"
        )
    if limit is None or (max_new_tokens is not None and longest + max_new_tokens <= limit):
        assert max_new_tokens is not None, "refused above"
        return max_new_tokens
    if longest >= limit:
        raise ValueError(f"the prompt has {longest} tokens, and the model's context ends at {limit}")
    if max_new_tokens is None:
        return limit - longest
    raise ValueError(
        f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} make {longest + max_new_tokens}, "
        f"but the model's context ends at {limit}: ask for {limit - longest} or fewer"
    )


def default_end_ids(
    model: Model, tokenizer: PreTrainedTokenizerBase, turn_end_ids: Sequence[int] = ()
) -> list[int]:
    """The end tokens of the model's generation_config, of the tokenizer, and of a chat template's turns."""
    stated = cast(Any, model.generation_config).eos_token_id
    listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return list(dict.fromkeys([*listed, *own, *turn_end_ids]))


def searches_beams(model: Model, options: Mapping[str, Any]) -> bool:
    """Whether several answers are weighed against one another, so that none can be shown as it grows."""
    return int(options.get("num_beams") or cast(Any, model.generation_config).num_beams or 1) > 1


def decoding_options(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options among `chosen` that are not None. Whoever gives a temperature wants to sample."""
    given = {name: value for name, value in chosen.items() if value is not None}
    if "do_sample" not in given and any(name in given for name in _SAMPLING):
        given["do_sample"] = True
    return given


def guessing_options(
    tokenizer: PreTrainedTokenizerBase, assistant: str, *, trust_remote_code: bool
) -> dict[str, Any]:
    """What lets a small model guess the next tokens. It is all in memory, on the CPU.

    Raises ValueError or OSError when there is no such model.
    """
    its_tokenizer = load_tokenizer(
        assistant, trust_remote_code=trust_remote_code, key="generation.assistant_model"
    )
    model = AutoModelForCausalLM.from_pretrained(assistant, dtype="auto", trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"assistant_model": model.eval()}
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        options["assistant_tokenizer"] = its_tokenizer
    return options


def first_stop(text: str, stop: Sequence[str]) -> int:
    """Where the first of the stop texts begins in `text`; -1 without one."""
    places = [place for place in (text.find(word) for word in stop) if place >= 0]
    return min(places, default=-1)


def _answer(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    end_ids: Sequence[int],
    stop: Sequence[str],
    pad_id: int,
    room: int,
) -> Answer:
    end = next((i for i, token in enumerate(ids) if token in end_ids), None)
    # A row that has ended is filled with padding while others go on; which may be an end token itself.
    said = ids if end is None else ids[:end]
    while end is None and stop and said and said[-1] == pad_id:
        said = said[:-1]
    text = str(tokenizer.decode(said, skip_special_tokens=True))
    if (place := first_stop(text, stop)) >= 0:
        return Answer(said, text[:place], "stop")
    if first_stop(str(tokenizer.decode(said)), stop) >= 0:  # a special token as a stop text
        return Answer(said, text, "stop")
    if end is not None:
        return Answer(ids[: end + 1], text, "eos")
    # What is shorter without an end was ended by a stop text that began in the prompt.
    return Answer(said, text, "length" if len(said) == room else "stop")


def _padded_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """`ids_BS` and `mask_BS`: 1 where a token is, 0 where padding."""
    width = max(map(len, rows))
    ids_BS = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    mask_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids_BS, mask_BS


def _pad_id(model: Model, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> int:
    candidates = [tokenizer.pad_token_id, cast(Any, model.generation_config).pad_token_id, *end_ids, 0]
    return next(int(token) for token in candidates if token is not None)
