"""Chat templates that differ as those of published models do. All are written for these tests.

Use them with `tiny_tokenizer(template, more_special_tokens=MORE_SPECIAL_TOKENS)`.
"""

from __future__ import annotations

from tests.tiny_tokenizer import CHATML, CHATML_MARKED

# Turns between headers, contents trimmed, a BOS at the start.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
# No generation prompt: an answer starts where an instruction ends. A system turn goes into the first one.
INSTRUCTIONS = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}[INST] {{ ns.system + m.content }} [/INST]{% set ns.system = '' %}"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# Another name for the assistant, turns that must alternate, no system turns.
MODEL_TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}"
    "{% endif %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# One more token after the last turn, unless an answer is due.
CLOSED_TWICE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# The last answer ends with another token than the earlier ones.
ENDS_DIFFER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ '<|eot|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Answers in a row share one header and one end.
JOINS = (
    "{% for m in messages %}{% set before = messages[loop.index0 - 1].role if loop.index0 else '' %}"
    "{% set after = messages[loop.index0 + 1].role if not loop.last else '' %}"
    "{{ '\n' if m.role == before else '<|im_start|>' + m.role + '\n' }}{{ m.content }}"
    "{{ '' if m.role == after else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reads lists of parts, and a string letter by letter.
PARTS = CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")

# Tools, calls and results; the arguments of a call are written as JSON.
_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
)
TOOLS = _TOOLS + CHATML.replace("{{ m.content }}", "{{ m.content }}" + _CALLS)
TOOLS_MARKED = _TOOLS + CHATML_MARKED.replace(
    "{% generation %}{{ m.content }}", "{% generation %}{{ m.content }}" + _CALLS
)
# The same with arguments that must come as a string.
TOOLS_OF_STRINGS = TOOLS.replace("call.function.arguments | tojson", "'' + call.function.arguments")
# The definitions, but neither calls nor results.
TOOLS_IN_NAME_ONLY = _TOOLS + CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.content %}"
)

# Reasoning is shown after the last question only (a result is no question), there even where it is empty.
_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
REASONING = (
    _LAST_QUESTION
    + _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    + "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    + "{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same, and the generation prompt opens the thought.
PROMPTED_REASONING = REASONING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
    "(loop.last or m.reasoning_content)", "true"
)

# What those templates write beside the three special tokens that every tiny tokenizer has.
MORE_SPECIAL_TOKENS = (
    *("<|head|>", "<|/head|>", "<|eot|>", "[INST]", "[/INST]", "</s>", "<turn>", "</turn>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
)
