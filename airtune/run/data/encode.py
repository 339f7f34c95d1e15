"""Text to token ids: the one path that training, evaluation and generation share.

A model meets at generation the ids that it met in training only if both come from the same code, so every id
that airtune makes is made here. Two kinds of text differ in who writes the special tokens:

    rendered by a chat template   the template wrote them all; the tokenizer must add none (a doubled BOS
                                  costs quality and shows in no loss curve)
    plain                         what the tokenizer puts before a text (mostly BOS or nothing) is put there
                                  once, and a text that is learned gets exactly one EOS

Rows that come as token ids are used as they are: whoever made them has put in what belongs there.

Learned spans are characters; their tokens are found by offsets in the one tokenisation of the whole text.
Tokenising prompt and completion apart would be simpler, and would give the prompt the same ids whatever
follows, but several tokenizers write a space before any text they are given, and "2+2=" with "4" would be
learned as "2+2= 4". So a text is tokenised whole, and a token that straddles a border belongs to the learned
side, since it holds a character that must be learned. What this gives up: where a prompt ends in a space that
the tokenizer joins to the next word, generation starts from other ids than training did. Such rows are
counted and reported.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from airtune.run.data.chat import ChatRenderer
from airtune.run.data.forms import IGNORED_LABEL, Conversation, Tokens
from airtune.run.data.messages import checked_messages, checked_tools
from airtune.run.data.templates import Span, resolve_template
from airtune.run.data.texts import Script


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of one row, and for each whether it is learned (1) or context (0): 5 bytes a token.

    Position 0 is never learned: nothing stands before it that could predict it.
    `straddles`: a token holds characters of both sides of the border at which a learned span starts.
    """

    ids: array[int]
    learned: bytearray
    straddles: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def supervised_tokens(self) -> int:
        return sum(self.learned)

    def cut(self, max_length: int) -> Encoded:
        return Encoded(self.ids[:max_length], self.learned[:max_length], self.straddles)


class Encoder:
    """Tokenises scripts in batches. Needs a "fast" tokenizer (offsets), and an EOS token for plain texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say which characters a token stands for, so learned "
                "spans cannot be found: use a tokenizer that comes with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.opening = opening_ids(tokenizer)

    def encode(self, rows: Sequence[Script | Tokens]) -> list[Encoded]:
        """One `Encoded` a row, in their order. `Tokens` have been checked by `ScriptWriter.write`."""
        scripts = iter(self._encode_scripts([row for row in rows if isinstance(row, Script)]))
        return [_encode_tokens(row) if isinstance(row, Tokens) else next(scripts) for row in rows]

    def _encode_scripts(self, scripts: Sequence[Script]) -> list[Encoded]:
        if not scripts:
            return []
        batch = self.tokenizer(
            [script.text for script in scripts],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # lengths are this package's business: no warning about long texts
        )
        rows = zip(scripts, batch["input_ids"], batch["offset_mapping"], strict=True)
        return [self._encode(script, ids, offsets) for script, ids, offsets in rows]

    def _encode(self, script: Script, ids: list[int], offsets: list[Span]) -> Encoded:
        learned, straddles = _mask(offsets, script.learned)
        if script.plain:
            opened = _open(self.opening, ids)
            learned[:0] = bytes(len(opened) - len(ids))
            ids = self._close(opened, learned)
        if learned:
            learned[0] = 0
        return Encoded(array("i", ids), learned, straddles)

    def _close(self, ids: list[int], learned: bytearray) -> list[int]:
        eos_id = self.tokenizer.eos_token_id
        if eos_id is None:
            raise ValueError(
                "the tokenizer has no EOS token, so the end of a text cannot be learned: set eos_token"
            )
        if ids and ids[-1] == eos_id and learned[-1]:  # the text was written with its EOS
            return ids
        learned.append(1)
        return [*ids, eos_id]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Mapping[str, object]],
    chat_template: str | None = None,
    tools: object = None,
) -> list[int]:
    """Ids of what the model is to continue: a plain text, or a conversation with an answer due.

    tools: definitions of functions that a conversation may call, as in a row of training data.
    """
    if isinstance(prompt, str):
        if tools:
            raise ValueError("a plain text has no place for tools: give the prompt as a list of messages")
        ids = _open(opening_ids(tokenizer), _bare_ids(tokenizer, prompt))
    else:
        messages, _ = checked_messages(list(prompt), "prompt")
        dialogue = Conversation(messages, checked_tools(tools))
        renderer = ChatRenderer(tokenizer, resolve_template(tokenizer, chat_template))
        ids = _bare_ids(tokenizer, renderer.prompt(dialogue))
    if not ids:
        raise ValueError("the prompt has no tokens, and a model cannot continue nothing: give it some text")
    return ids


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text when it adds special tokens: [BOS], [], rarely more."""
    probe = "a"
    bare, whole = _bare_ids(tokenizer, probe), list(tokenizer(probe)["input_ids"])
    starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    if not bare or not starts:
        raise ValueError(f"the tokenizer turns {probe!r} into {bare}, but into {whole} with special tokens")
    return whole[: starts[0]]


def _encode_tokens(tokens: Tokens) -> Encoded:
    labels = tokens.ids if tokens.labels is None else tokens.labels
    learned = bytearray(label != IGNORED_LABEL for label in labels)
    if learned:
        learned[0] = 0
    return Encoded(array("i", tokens.ids), learned)


def _bare_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _open(opening: list[int], ids: list[int]) -> list[int]:
    """`ids` after `opening`, unless the text was written with it."""
    return ids if ids[: len(opening)] == opening else [*opening, *ids]


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> tuple[bytearray, bool]:
    """One byte a token, 1 where it holds a character of a span; and whether a span starts inside a token.

    `spans` are in order and apart. Byte-level tokenizers may report a token without its leading spaces, so a
    token is taken to reach back to the end of the one before it; spaces at the start of the text may be
    reported as nothing at all, and belong to a span that starts there. The tokens of one multi-byte character
    share its offsets.
    """
    mask, straddles = bytearray(len(offsets)), False
    span_index, reached = 0, 0
    for i, (start, end) in enumerate(offsets):
        start, reached = min(start, reached), max(end, reached)
        while span_index < len(spans) and start >= spans[span_index][1]:
            span_index += 1
        if span_index == len(spans):
            break
        first = spans[span_index][0]
        if end > first or first == 0:
            mask[i] = 1
            straddles |= start < first
    return mask, straddles
