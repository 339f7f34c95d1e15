"""Fine-tune and run language models that are far larger than the memory of the machine.

    model = airtune.load("Qwen/Qwen3-8B", lora=peft.LoraConfig(r=16, target_modules="all-linear"))
    model(**batch).loss.backward()

The names load lazily, so that `python -m airtune.train --help` and a mistyped key do not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airtune.model.build import load
    from airtune.model.stream import Stream, Visit, stream_of

__all__ = ["Stream", "Visit", "load", "stream_of"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load":
        from airtune.model.build import load

        return load
    if name in ("Stream", "Visit", "stream_of"):
        from airtune.model import stream

        return getattr(stream, name)
    raise AttributeError(f"module 'airtune' has no attribute {name!r}")
