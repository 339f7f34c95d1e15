"""How well an answer that a model wrote agrees with the one that was expected, as a number from 0 to 1.

    exact_match   the two are the same, but for space around them (and, if asked, inside them)
    regex         what a pattern captures is the same in both: the number after "####", the letter of a choice
    rouge_l       the longest common subsequence of their words, as an F-measure (Lin 2004, ROUGE-L)

Exact match is hard on prose and the longest common subsequence is blind to a wrong digit: which one says
something depends on the data, so each is asked for by name. Words are runs of letters and digits of any
script, without regard to case, and single characters of Chinese and Japanese, which leave no space between
words; on English text the numbers are those of the package rouge_score without stemming.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Score = Callable[[str, str], float]  # (answer, expected) -> 0..1

_UNSPACED = "\u3040-\u30ff\u3400-\u9fff"  # kana and Han
_WORD = re.compile(rf"(?=\w)[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


def chosen_scores(names: Sequence[str], *, ignore_space: bool, pattern: str | None) -> dict[str, Score]:
    """The scores called `names`.

    ignore_space: of exact_match; any run of white space is one space. pattern: of regex, which needs one.
    Raises ValueError when it does not compile.
    """
    known: dict[str, Score] = {
        "exact_match": lambda answer, expected: exact_match(answer, expected, ignore_space=ignore_space),
        "rouge_l": rouge_l,
    }
    if pattern is not None:
        compiled = _compiled(pattern)
        known["regex"] = lambda answer, expected: regex_match(answer, expected, compiled)
    return {name: known[name] for name in names}


def exact_match(answer: str, expected: str, *, ignore_space: bool = False) -> float:
    """1 if both texts are the same, 0 if not. Space around them never counts."""
    if ignore_space:
        return float(answer.split() == expected.split())
    return float(answer.strip() == expected.strip())


def regex_match(answer: str, expected: str, pattern: re.Pattern[str]) -> float:
    """1 if `pattern` finds in the answer what it finds in the expected one (all of that if it finds nothing).

    The last place where it matches counts, and of that its first group, if it has one.
    """
    found, wanted = _captured(answer, pattern), _captured(expected, pattern)
    return float(found is not None and found == (expected.strip() if wanted is None else wanted))


def rouge_l(answer: str, expected: str) -> float:
    """2 P R / (P + R), where P and R are the longest common subsequence's share of each text's words."""
    words, wanted = _words(answer), _words(expected)
    common = _common_length(words, wanted)
    return 2 * common / (len(words) + len(wanted)) if common else float(not words and not wanted)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def _captured(text: str, pattern: re.Pattern[str]) -> str | None:
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    found = matches[-1][1 if pattern.groups else 0]
    return None if found is None else str(found).strip()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    Rows of the usual table as bits of one integer (Hyyro 2004): answers of two thousand words take
    milliseconds where the table in Python would take seconds. A bit is 0 where the length grows.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    everything = (1 << len(first)) - 1
    row = everything
    for word in second:
        matched = row & places.get(word, 0)
        row = (row + matched | row - matched) & everything
    return len(first) - row.bit_count()
