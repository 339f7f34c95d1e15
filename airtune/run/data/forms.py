"""The forms that rows come in, and the four kinds of content behind them.

    form               must have                  content
    messages           messages                   Conversation
    sharegpt           conversations              Conversation
    alpaca             instruction, output        Conversation: (system, history,) instruction + input, output
    prompt_completion  prompt, completion         Continuation of strings, Conversation of lists of messages
    preference         chosen, rejected           the same, of prompt and chosen
    text               text                       PlainText
    tokens             input_ids                  Tokens

A `null` says that there is no value; `0`, `false` and `""` are values. Lists may also come as JSON in a
string, which is how they sit in the cells of a table. Messages are brought to one shape (see `messages`)
whichever form they are from.

`preference` is never guessed. Rows with a better and a worse answer are made to tell the two apart, and
learning the better one alone is something else; so it has to be asked for. Nor are rows whose answer is rated
by a boolean `label`: half of those answers are there as bad examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from airtune.run.data.messages import Message, checked_list, checked_messages, checked_tools
from airtune.run.data.records import Row, describe

Fields = Mapping[str, object]

# Each form with the fields that it must have, and those that it reads besides.
FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "text": ("text",),
    "tokens": ("input_ids",),
}
CONVERSATIONS = ("messages", "sharegpt", "alpaca")  # the forms whose rows all are conversations
_WITH_MESSAGES = ("system", "tools", "functions")
ALSO_READ: dict[str, tuple[str, ...]] = {
    "messages": _WITH_MESSAGES,
    "sharegpt": _WITH_MESSAGES,
    "alpaca": ("input", "history", *_WITH_MESSAGES),
    "prompt_completion": _WITH_MESSAGES,
    "preference": ("prompt", "messages", "conversations", "instruction", "input", "history", *_WITH_MESSAGES),
    "text": (),
    "tokens": ("labels", "attention_mask"),
}
_MEDIA = ("images", "videos", "audios")
IGNORED_LABEL = -100  # of a token that is not learned, here and in transformers


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns for a chat template.

    tools: definitions of functions, each {"type": "function", "function": {...}}. given: the first `given`
    messages are a prompt and never learned. learned: for each message whether the row lets it be learned;
    None where no message of the row says so.
    """

    messages: list[Message]
    tools: list[dict[str, object]] | None = None
    given: int = 0
    learned: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """Two strings: the second is what follows the first."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PlainText:
    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of some tokenizer. labels: as long as ids, -100 where nothing is learned; None: all is learned."""

    ids: list[int]
    labels: list[int] | None


Content = Conversation | Continuation | PlainText | Tokens


def forms_of(fields: Fields) -> list[str]:
    """The forms whose fields are all there."""
    return [form for form, names in FORMS.items() if has_form(fields, form)]


def has_form(fields: Fields, form: str) -> bool:
    return all(fields.get(name) is not None for name in FORMS[form])


def detect(fields: Fields) -> str:
    """The form of a row. ValueError when there is none, more than one, or one that has to be asked for."""
    forms = forms_of(fields)
    if "preference" in forms:
        raise ValueError(
            "the row has a better and a worse answer (chosen, rejected), which are not compared here: set "
            "data.format=preference to learn the chosen answers and leave the rejected ones out"
        )
    if not forms:
        raise ValueError(unknown_form(fields))
    if len(forms) > 1:
        raise ValueError(f"the row could be any of {', '.join(forms)}: set data.format to one of them")
    if isinstance(fields.get("label"), bool) and forms[0] in ("messages", "sharegpt", "prompt_completion"):
        raise ValueError(
            f"the answer is rated (label {describe(fields['label'])}), and ratings are not used here: take "
            f"the bad answers out, or set data.format={forms[0]} to learn all of them"
        )
    return forms[0]


def unknown_form(fields: Fields) -> str:
    expected = ", or ".join(" and ".join(names) for names in FORMS.values())
    return f"the row is of no known form: {named_fields(fields)}. Expected {expected}"


def named_fields(fields: Fields) -> str:
    names = [f"{name} (null)" if value is None else name for name, value in fields.items()]
    return f"the fields {', '.join(names)}" if names else "an empty object"


def canonical(row: Row, form: str) -> Content:
    """What a row of `form` (a key of `FORMS`) holds. ValueError says what is wrong with it, but not where."""
    fields = row.fields
    if form in ("messages", "sharegpt"):
        name = FORMS[form][0]
        return conversation(fields, *checked_messages(fields[name], name))
    if form == "alpaca":
        answer = _turn("assistant", _string(fields, "output"))
        return conversation(fields, [*_alpaca_turns(fields), answer])
    if form == "prompt_completion":
        return _prompt_completion(fields)
    if form == "preference":
        return _preferred(fields)
    if form == "text":
        return PlainText(_string(fields, "text"))
    assert form == "tokens", form
    return _tokens(fields)


def conversation(
    fields: Fields, messages: list[Message], learned: tuple[bool, ...] | None = None, given: int = 0
) -> Conversation:
    """`messages` with the system turn and the tools that are fields of the row."""
    for name in _MEDIA:
        if fields.get(name) not in (None, "", []):
            raise ValueError(f"the row has {name}: only text can be learned from")
    tools = checked_tools(fields["tools"] if fields.get("tools") is not None else fields.get("functions"))
    if fields.get("system") not in (None, ""):  # tables have the column for every row: "" adds no turn
        if messages[0]["role"] in ("system", "developer"):
            raise ValueError("system is given twice: as a field of the row and as the first message")
        messages = [_turn("system", _string(fields, "system")), *messages]
        learned = None if learned is None else (True, *learned)
        given += given > 0
    return Conversation(messages, tools, given, learned)


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _string(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {describe(value)}")
    return value


def _alpaca_turns(fields: Fields) -> list[Message]:
    """What comes before the answer: earlier questions and answers, then the instruction with its input."""
    turns = []
    if fields.get("history") not in (None, ""):
        for i, pair in enumerate(checked_list(fields["history"], "history")):
            if not (
                isinstance(pair, list) and len(pair) == 2 and all(isinstance(said, str) for said in pair)
            ):
                raise ValueError(f"history[{i}] must be a list of two strings, got {describe(pair)}")
            turns += [_turn("user", pair[0]), _turn("assistant", pair[1])]
    instruction = _string(fields, "instruction")
    about = "" if fields.get("input") is None else _string(fields, "input")
    between = "\n\n" if instruction and about else ""
    return [*turns, _turn("user", instruction + between + about)]


def _prompt_completion(fields: Fields) -> Continuation | Conversation:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        given, given_learned = checked_messages(prompt, "prompt")
        answered, learned = checked_messages(completion, "completion")
        if given_learned is not None or learned is not None:
            learned = (given_learned or (True,) * len(given)) + (learned or (True,) * len(answered))
        return conversation(fields, given + answered, learned, given=len(given))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise ValueError("prompt and completion must both be strings or both be lists of messages")
    return _continuation(fields, "completion")


def _continuation(fields: Fields, completion: str) -> Continuation:
    for name in _WITH_MESSAGES:
        if fields.get(name) not in (None, "", []):
            raise ValueError(f"{name} has no place beside strings: give prompt and {completion} as messages")
    return Continuation(_string(fields, "prompt"), _string(fields, completion))


def _preferred(fields: Fields) -> Continuation | Conversation:
    """The prompt and the chosen answer. Where `chosen` is a whole conversation, it may repeat the prompt."""
    chosen = fields["chosen"]
    if isinstance(chosen, str) and isinstance(fields.get("prompt"), str):
        return _continuation(fields, "chosen")
    if isinstance(chosen, str):
        answers = [_turn("assistant", chosen)]
    else:
        answers, _ = checked_messages([chosen] if isinstance(chosen, dict) else chosen, "chosen")
    if answers[0]["role"] != "assistant":
        if answers[-1]["role"] != "assistant":
            raise ValueError("chosen must end with the answer of the assistant")
        return conversation(fields, answers, given=len(answers) - 1)
    given = _prompt_of_preference(fields)
    return conversation(fields, given + answers, given=len(given))


def _prompt_of_preference(fields: Fields) -> list[Message]:
    if isinstance(fields.get("prompt"), str):
        return [_turn("user", _string(fields, "prompt"))]
    for name in ("prompt", "messages", "conversations"):
        if fields.get(name) is not None:
            return checked_messages(fields[name], name)[0]
    if fields.get("instruction") is not None:
        return _alpaca_turns(fields)
    raise ValueError(
        "chosen answers something: expected it in prompt, messages, conversations or instruction"
    )


def _tokens(fields: Fields) -> Tokens:
    ids = _ids(fields["input_ids"], "input_ids")
    labels = fields.get("labels")
    checked = None if labels is None else _ids(labels, "labels", or_else=IGNORED_LABEL)
    mask = fields.get("attention_mask")
    real = [1] * len(ids) if mask is None else _ids(mask, "attention_mask")
    for name, other in (("labels", checked), ("attention_mask", real)):
        if other is not None and len(other) != len(ids):
            raise ValueError(f"{name} has {len(other)} values, but input_ids has {len(ids)}")
    if any(value > 1 for value in real):
        raise ValueError("attention_mask numbers several texts in one row: give each a row of its own")
    if not any(real):
        raise ValueError("input_ids must have at least one id, padding aside")
    if checked is not None:  # padding is put on, and masked, when rows are put in batches
        checked = [label for label, is_real in zip(checked, real, strict=True) if is_real]
    return Tokens([token for token, is_real in zip(ids, real, strict=True) if is_real], checked)


def _ids(value: object, name: str, or_else: int | None = None) -> list[int]:
    ids = []
    for i, number in enumerate(checked_list(value, name)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"{name}[{i}] must be an integer, got {describe(number)}")
        if number < 0 and number != or_else:
            allowed = "0 or more" + ("" if or_else is None else f", or {or_else}")
            raise ValueError(f"{name}[{i}] is {number}, expected {allowed}")
        ids.append(number)
    return ids
