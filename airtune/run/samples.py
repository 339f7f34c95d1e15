"""Questions that a model answers before it is trained and after: what a loss curve does not show.

They are written as the training rows are: a user's turn where those are conversations, else a text to go on
from. Every new token is a pass over all weights, so all questions are answered in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from airtune.run.generation import default_end_ids, generate_batch, room_for_answers
from airtune.run.prompts import Prompt, PromptWriter


@dataclass(frozen=True)
class Samples:
    """Texts, their ids, and how they are answered. turn_end_ids: see `PromptWriter`."""

    texts: Sequence[str]
    ids: list[list[int]]
    turn_end_ids: list[int]
    max_new_tokens: int

    def check(self, model: PeftModel) -> None:
        """ValueError when an answer has no room in the model's context: said before hours of training."""
        for text, ids in zip(self.texts, self.ids, strict=True):
            try:
                room_for_answers(model, [len(ids)], self.max_new_tokens)
            except ValueError as error:
                raise ValueError(f"tracking.sample_prompts, {text[:40]!r}: {error}") from error

    def answers(self, model: PeftModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """What the model says to each, greedily; what the limit of tokens cut ends in an ellipsis."""
        if not self.texts:
            return []
        answers = generate_batch(
            model,
            tokenizer,
            self.ids,
            max_new_tokens=self.max_new_tokens,
            end_ids=default_end_ids(model, tokenizer, self.turn_end_ids),
            do_sample=False,
        )
        return [said.text.strip() + ("…" if said.finish == "length" else "") for said in answers]


def write_samples(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    chats: bool,
    chat_template: str | None,
    max_new_tokens: int,
) -> Samples:
    """`chats`: whether texts are a user's turns. ValueError when one of them cannot be written."""
    writer = PromptWriter(tokenizer, chat=chats, chat_template=chat_template)
    prompts = [Prompt(text, where=f"tracking.sample_prompts, {text[:40]!r}") for text in texts]
    return Samples(
        texts, [writer.encode(prompt) for prompt in prompts], writer.turn_end_ids(), max_new_tokens
    )
