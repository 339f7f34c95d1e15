"""What became of the rows: the account that training logs and `inspect_data` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airtune.run.data.encode import Encoded

TOO_LONG = "longer than max_length"
NOTHING_LEFT = "nothing to learn after the cut"
NOTHING_TO_LEARN = "nothing to learn"
BAD_ROW = "bad row"


@dataclass
class Summary:
    """Counts of rows and tokens. Tokens are those of the rows that are used.

    `notes` are what the user should know of these rows; they are said at every start, also when the rows
    themselves come from an earlier one.
    """

    form: str
    learn_on: str
    max_length: int  # tokens
    read: int = 0
    used: int = 0
    truncated: int = 0
    longest: int = 0  # tokens, before any cut
    chat: bool = False  # a chat template wrote rows
    total_tokens: int = 0
    supervised_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    first_dropped: dict[str, str] = field(default_factory=dict)  # by reason: file:line, and what was wrong
    notes: list[str] = field(default_factory=list)

    def use(self, encoded: Encoded) -> None:
        self.used += 1
        self.total_tokens += len(encoded)
        self.supervised_tokens += encoded.supervised_tokens

    def drop(self, where: str, reason: str) -> None:
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, where)

    def __str__(self) -> str:
        lines = [("rows read", self.read, f"form {self.form}"), ("rows used", self.used, "")]
        for reason, count in self.dropped.items():
            lines.append((f"dropped, {reason}", count, f"first at {self.first_dropped[reason]}"))
        lines.append(("rows truncated", self.truncated, ""))
        lines.append(("tokens", self.total_tokens, ""))
        lines.append(("tokens supervised", self.supervised_tokens, f"learn_on {self.learn_on}"))
        width = max(len(name) for name, _, _ in lines)
        return "\n".join(f"{name:{width}}  {count:>12,}  {note}".rstrip() for name, count, note in lines)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Summary:
        """From the `vars` of one, by way of JSON."""
        return cls(**{**fields, "dropped": Counter(fields["dropped"])})
