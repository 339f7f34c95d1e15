"""Scores of answers: what counts as the same, and ROUGE-L against its table and against the usual package."""

from __future__ import annotations

import random
import re

import pytest

from airtune.run.scores import chosen_scores, exact_match, regex_match, rouge_l

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "two", "dogs", "slept"]


@pytest.mark.parametrize(
    ("answer", "expected", "ignore_space", "score"),
    [
        ("Rome.", "Rome.", False, 1),
        (" Rome.\n", "Rome.", False, 1),
        ("Rome", "Rome.", False, 0),
        ("rome.", "Rome.", False, 0),
        ("a  b\nc", "a b c", False, 0),
        ("a  b\nc", "a b c", True, 1),
        ("ab c", "a b c", True, 0),
        ("", "", False, 1),
        ("0", "", False, 0),
    ],
)
def test_exact_match(answer: str, expected: str, ignore_space: bool, score: float) -> None:
    assert exact_match(answer, expected, ignore_space=ignore_space) == score


@pytest.mark.parametrize(
    ("pattern", "answer", "expected", "score"),
    [
        (r"#### (-?\d+)", "3 + 4 = 7\n#### 7", "#### 7", 1),
        (r"#### (-?\d+)", "#### 7 no, #### 8", "#### 8", 1),  # the last place counts
        (r"#### (-?\d+)", "it is 7", "#### 7", 0),
        (r"#### (-?\d+)", "#### 7", "7", 1),  # nothing in the expected one: all of it
        (r"\b[A-D]\b", "I say B", "B", 1),
        (r"\b[A-D]\b", "none", "none", 0),
        (r"(x)|y", "y", "y", 0),  # the group took no part: nothing was found
    ],
)
def test_regex(pattern: str, answer: str, expected: str, score: float) -> None:
    assert regex_match(answer, expected, re.compile(pattern)) == score


def table_length(first: list[str], second: list[str]) -> int:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def random_pairs(count: int = 200) -> list[tuple[list[str], list[str]]]:
    draw = random.Random(0)
    return [
        (draw.choices(WORDS, k=draw.randint(0, 40)), draw.choices(WORDS, k=draw.randint(0, 40)))
        for _ in range(count)
    ]


def test_rouge_l_equals_the_table() -> None:
    for first, second in random_pairs():
        common = table_length(first, second)
        precision, recall = common / max(len(first), 1), common / max(len(second), 1)
        want = 2 * precision * recall / (precision + recall) if common else float(not first and not second)
        assert rouge_l(" ".join(first), ", ".join(second).upper()) == pytest.approx(want)


def test_rouge_l_equals_the_usual_package() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    for first, second in random_pairs(50):
        answer, expected = "x " + "-".join(first), "x: " + " ".join(second)
        assert rouge_l(answer, expected) == pytest.approx(scorer.score(expected, answer)["rougeL"].fmeasure)


def test_rouge_l_knows_other_scripts_and_no_punctuation() -> None:
    assert rouge_l("Это кот!", "это, кот") == 1.0
    assert rouge_l("...", "это") == 0.0 and rouge_l("", "...") == 1.0


def test_scores_are_chosen_by_name() -> None:
    chosen = chosen_scores(["rouge_l", "exact_match", "regex"], ignore_space=True, pattern=r"\d+")
    assert list(chosen) == ["rouge_l", "exact_match", "regex"]
    assert [score("a  7", "a 7") for score in chosen.values()] == [1.0, 1.0, 1.0]


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="is no regular expression"):
        chosen_scores(["regex"], ignore_space=False, pattern="(")


def test_words_of_scripts_without_spaces_are_characters() -> None:
    """A sentence of them as one word would score 0 for anything but the same sentence."""
    assert rouge_l("我叫 Juniper。", "我是 juniper 你好") == pytest.approx(2 * 2 / (3 + 5))
    assert rouge_l("나는 학생", "나는 선생") == 0.5  # Korean has spaces
