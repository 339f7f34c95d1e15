"""A conversation on a terminal.

Every answer is made from the whole conversation, as its template writes it now: earlier turns may be written
differently once there are later ones (reasoning that is shown in the last turn only), so nothing is kept
between answers but the messages. Reading them again costs one pass over the weights, as one more token does.

Ctrl-C ends the answer after the token that is being made, not the program: an exception out of the middle of
a pass would leave a layer half-read. A second one, before the first has come to anything, ends the program.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from airtune.run.data.messages import Message
from airtune.run.prompts import Prompt, PromptWriter
from airtune.run.speaker import Interrupted, Speaker

GREETING = "/reset begins a new conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer."


def converse(speaker: Speaker, writer: PromptWriter, *, read: Callable[[str], str] = input) -> None:
    """Ask and answer until the user leaves. `read` shows its argument and returns a line, as `input` does."""
    with contextlib.suppress(ImportError):  # not every Python has it; it gives `input` a history
        import readline  # noqa: F401
    note = "" if writer.chats else " There is no chat template: each text is gone on with by itself."
    speaker.err.write(f"{GREETING}{note}\n")
    history: list[Message] = []
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            speaker.out.write("\n")
            return
        except KeyboardInterrupt:
            speaker.err.write(f"\n{GREETING}\n")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            history = []
        elif line:
            history = _turn(speaker, writer, history, line)


def _turn(speaker: Speaker, writer: PromptWriter, history: list[Message], line: str) -> list[Message]:
    """Answer `line` and return the longer conversation; what cannot be answered is said and forgotten."""
    asked: list[Message] = [*history, {"role": "user", "content": line}]
    try:
        ids = writer.encode(Prompt(asked if writer.chats else line))
        speaker.check(ids)
    except ValueError as error:
        speaker.err.write(f"{error}\n(/reset begins a new conversation)\n")
        return history
    with _ended_by_ctrl_c() as interrupted:
        answer = speaker.say(ids, interrupted)
    if not writer.chats or not answer.text:
        return history
    return [*asked, {"role": "assistant", "content": answer.text}]


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[Interrupted]:
    interrupted = Interrupted()

    def end_answer(signum: int, frame: FrameType | None) -> None:
        interrupted.now = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, end_answer)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
