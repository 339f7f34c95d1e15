"""A tokenizer that is trained offline in milliseconds, chat templates that differ in what matters, and a row.

Byte-level BPE on a handful of sentences: common words become one token, everything else falls apart into
pieces, and any text survives a round trip. The special tokens are `<|bos|>`, `<|im_start|>`, `<|im_end|>`
(EOS, and the pad token unless asked otherwise: the worst case for padding masks).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "Who are you? I am a lamp. What is your name? My name is Juniper.",
    "What is the capital of Italy? The capital of Italy is Rome.",
    "yes no one two three four five six seven eight nine ten",
    "system user assistant\nUser: hello world\nAssistant: hello world\n",
    "You are kind. Say yes. Say no. The answer is yes. The answer is no.",
]

# Every turn alike; the end token closes it, and a line end follows.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same text, with the answers marked.
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Depends on the history: the last turn shows its (empty) reasoning, earlier ones do not.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens a thought that finished conversations do not show.
PROMPTED_THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# Leaves system turns out without a word.
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Refuses system turns.
RAISES_ON_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHATML
)
# No end token: a line end closes a turn.
LINES = (
    "{% for m in messages %}{{ 'User: ' if m.role == 'user' else 'Assistant: ' }}"
    "{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Writes its own BOS, as many templates do.
WITH_BOS = "{{ bos_token }}" + CHATML

CHAT_ROW = {
    "messages": [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}],
}


def write_jsonl(folder: Path, *rows: object, name: str = "rows.jsonl") -> str:
    """Writes one line a row and returns the path."""
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def tiny_tokenizer(
    chat_template: str | None = CHATML,
    *,
    adds_bos: bool = False,
    trim_offsets: bool = True,
    pad_token: str | None = "<|im_end|>",
    more_special_tokens: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """`adds_bos`: special tokens are `<|bos|> text`. `trim_offsets`: offsets without leading spaces.

    `more_special_tokens` get the ids after the vocabulary.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 4, trainer)
    steps: list[processors.PostProcessor] = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        steps.append(processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]))
    backend.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token=pad_token,
        extra_special_tokens=["<|im_start|>", *more_special_tokens],
        chat_template=chat_template,
    )
