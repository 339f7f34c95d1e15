"""Messages in one shape, whatever they were written for.

The same conversation is written in several ways: OpenAI's (role, content, tool_calls with arguments as a JSON
string), its older one (function_call, role function), ShareGPT's (from, value, with calls as turns of their
own), and what tables make of these. A chat template reads one of them, so all become:

    role               system, developer, user, assistant or tool
    content            a string; text parts are joined, and "" where a message with calls had none
    tool_calls         [{"type": "function", "function": {"name": ..., "arguments": object}}]
    anything else      as it was (name, tool_call_id, reasoning_content, ...), but for what is null

Templates write arguments out as JSON themselves; a string would come out quoted twice, without a word.
What a text cannot hold (images, sound) is refused: leaving it out would teach answers to nothing.
"""

from __future__ import annotations

import json

from airtune.run.data.records import describe, parse_json

Message = dict[str, object]  # role, content, and what else a chat template reads

ROLES: dict[str, str] = {  # what a role is called: what it becomes
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "chatbot", "ai", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "ipython"), "tool"),
}
REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers gives templates each other's
CALL_ROLES = ("function_call", "tool_call", "tool_calls")  # a turn whose content is the call
_OWN_FIELDS = ("role", "from", "content", "value", "weight", "tool_calls", "function_call")


def checked_messages(value: object, name: str) -> tuple[list[Message], tuple[bool, ...] | None]:
    """`value` in one shape, and for each message whether its `weight` wants it learned.

    The second is None where no message has a weight; a message without one among others that have it is
    not objected to. ValueError says which message of `name` is wrong.
    """
    items = checked_list(value, name)
    if not items:
        raise ValueError(f"{name} must be a list of messages with at least one, got an empty list")
    messages = [_message(item, f"{name}[{i}]") for i, item in enumerate(items)]
    weights = [_weight(item, f"{name}[{i}]") for i, item in enumerate(items)]
    learned = None if all(weight is None for weight in weights) else tuple(weight != 0 for weight in weights)
    return messages, learned


def checked_tools(value: object) -> list[dict[str, object]] | None:
    """Definitions of tools, each {"type": "function", "function": {...}}; None where there are none."""
    if value in (None, ""):
        return None
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(checked_list(value, "tools"))] or None


def checked_list(value: object, name: str) -> list[object]:
    """A list, which may stand in a string as JSON: cells of tables hold nothing else."""
    if isinstance(value, str):
        value = _json(value, name)
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {describe(value)}")
    return value


def _json(text: str, name: str) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        # What pandas writes for a list looks like one, but has Python's quotes.
        raise ValueError(f"{name} is a string that is no JSON ({error}): {describe(text)}") from error


def _message(item: object, name: str) -> Message:
    if not isinstance(item, dict):
        raise ValueError(f"{name} must be an object with role and content, got {describe(item)}")
    said = _either(item, "role", "from")
    content = _either(item, "content", "value")
    calls = _calls(item, name)
    if said in CALL_ROLES:
        calls, content, role = calls + _calls_in(content, name), "", "assistant"
    else:
        role = _role(said, name)
    if calls and role != "assistant":
        raise ValueError(f"{name} has calls of tools, but its role is {role}, expected assistant")
    message: Message = {"role": role}
    reasoning = [key for key in REASONING if item.get(key) is not None]
    may_be_empty = bool(calls or reasoning)
    message["content"] = _content(content, role, may_be_empty, name)
    if calls:
        message["tool_calls"] = calls
    others = {key: other for key, other in item.items() if key not in _OWN_FIELDS and other is not None}
    for key in reasoning:
        if not isinstance(item[key], str):
            raise ValueError(f"{name}: {key} must be a string, got {describe(item[key])}")
    return message | others


def _either(item: dict[str, object], first: str, second: str) -> object:
    value = item.get(first)
    return item.get(second) if value is None else value


def _role(said: object, name: str) -> str:
    known = said.lower() if isinstance(said, str) else ""
    if known not in ROLES:
        named = ", ".join((*ROLES, *CALL_ROLES))
        raise ValueError(f"{name} has the role {describe(said)}, expected one of {named}")
    return ROLES[known]


def _weight(item: object, name: str) -> object:
    weight = item.get("weight") if isinstance(item, dict) else None
    if weight not in (None, 0, 1):
        raise ValueError(f"{name} has the weight {describe(weight)}, expected 0 (not learned) or 1")
    return weight


def _content(content: object, role: str, may_be_empty: bool, name: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if isinstance(content, list) and not (role == "tool" and not all(map(_is_part, content))):
        return "".join(_text_of(part, f"{name}, part {i}") for i, part in enumerate(content))
    if role == "tool" and content is not None:  # a result as it came: its text is its JSON
        return json.dumps(content, ensure_ascii=False)
    expected = "a string" + (", or calls of tools," if role == "assistant" else "")
    raise ValueError(f"{name} (role {role}) must have {expected} as content, got {describe(content)}")


def _is_part(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _text_of(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        what = f"of type {part.get('type')}" if isinstance(part, dict) else describe(part)
        raise ValueError(f"{name} is {what}: only text can be learned from, expected parts of type text")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{name} must have a string as text, got {describe(part.get('text'))}")
    return str(part["text"])


def _calls(item: dict[str, object], name: str) -> list[object]:
    calls: list[object] = []
    if item.get("tool_calls") is not None:
        listed = checked_list(item["tool_calls"], f"{name}.tool_calls")
        calls += [_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(listed)]
    if item.get("function_call") is not None:
        calls.append(_call(item["function_call"], f"{name}.function_call"))
    return calls


def _calls_in(content: object, name: str) -> list[object]:
    value = _json(content, name) if isinstance(content, str) else content
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise ValueError(f"{name} is the turn of a call, but calls nothing")
    return [_call(call, name) for call in listed]


def _call(call: object, name: str) -> dict[str, object]:
    if not isinstance(call, dict):
        raise ValueError(f"{name} must be an object with a function, got {describe(call)}")
    function = call.get("function")
    outer = {"type": "function", **call} if isinstance(function, dict) else {"type": "function"}
    inner = function if isinstance(function, dict) else call
    if not isinstance(inner.get("name"), str):
        raise ValueError(f"{name} must name a function with a string, got {describe(call)}")
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{name}: arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{name}: arguments must be an object, or one as JSON in a string, got {describe(arguments)}"
        )
    return {**outer, "function": {**inner, "arguments": arguments}}


def _tool(tool: object, name: str) -> dict[str, object]:
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        return {"type": "function", **tool}
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ValueError(f"{name} must define a function with a name, got {describe(tool)}")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
