"""The harness's requests on a streamed model against its own class on a resident one: the same numbers."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import airtune
from airtune.model.scoring import without_adapter
from airtune.run.harness import harness_model, open_tasks, rolling_windows, run_tasks
from airtune.run.questions import continuations
from tests.tiny_tokenizer import SENTENCES, tiny_tokenizer

pytest.importorskip("lm_eval")

MAX_LENGTH = 40


@pytest.fixture(scope="module", params=["bos", "no bos"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerFast:
    made = tiny_tokenizer(adds_bos=request.param == "bos")
    if request.param == "no bos":
        made.bos_token = None
    made.save_pretrained(folder := tmp_path_factory.mktemp("tokenizer"))
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def resident(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> PeftModel:
    """A tiny model with an adapter, in memory; its two halves are saved in folders `base` and `adapter`."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        max_position_embeddings=MAX_LENGTH, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    base = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).eval()
    model.save_pretrained(folder / "adapter")
    return model


@pytest.fixture
def streamed(resident: PeftModel) -> Iterator[PeftModel]:
    folder = Path(resident.get_base_model().name_or_path).parent
    model = airtune.load(
        folder / "base", adapter=folder / "adapter", dtype=torch.float32, device="cpu", micro_batch_size=2,
        file_access="buffered",
    ).eval()  # fmt: skip
    yield model
    airtune.stream_of(model).close()


def ours(model: PeftModel, tokenizer: PreTrainedTokenizerFast, batch_tokens: int = 200) -> Any:
    generate = partial(continuations, model, tokenizer, batch_size=3)
    return harness_model(model, tokenizer, generate, batch_tokens=batch_tokens, max_length=MAX_LENGTH)


def theirs(model: PeftModel, tokenizer: PreTrainedTokenizerFast) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(model, tokenizer=tokenizer, device="cpu", batch_size=2, max_length=MAX_LENGTH)


def requests(kind: str, arguments: list[tuple[object, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


def texts(count: int, words: int, seed: int = 0) -> list[str]:
    draw, known = random.Random(seed), " ".join(SENTENCES).split()
    return [" ".join(draw.choices(known, k=draw.randint(1, words))) for _ in range(count)]


@pytest.mark.parametrize("batch_tokens", [1, 200, 10_000])
def test_log_likelihoods_equal_those_of_the_resident_class(
    resident: PeftModel, streamed: PeftModel, tokenizer: PreTrainedTokenizerFast, batch_tokens: int
) -> None:
    # Without a context, with spaces at its end, longer than the model sees, letters that share their input.
    pairs = [(c, f" {a}") for c, a in zip(texts(12, 9), texts(12, 4, seed=1), strict=True)]
    pairs += [("", text) for text in texts(2, 4, seed=2)] + [("Say yes.  ", "yes")]
    pairs += [("hello world " * 30, "yes no one"), ("The answer is", "<|im_end|>")]
    pairs += [("Who are you? A", letter) for letter in ("!", "#", "$", "%")]
    pairs += [pairs[0]]
    ask = requests("loglikelihood", pairs)
    got = ours(streamed, tokenizer, batch_tokens).loglikelihood(ask)
    want = theirs(resident, tokenizer).loglikelihood(ask)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert [value for value, _ in got] == pytest.approx([value for value, _ in want], rel=1e-4)


def test_what_greedy_decoding_says_is_known_as_such(
    resident: PeftModel, streamed: PeftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    ask = []
    for ids in ([5, 6, 7], [40, 8], [9]):
        said = resident.generate(
            input_ids=torch.tensor([ids]), max_new_tokens=3, do_sample=False, eos_token_id=[]
        )
        best = said[0, len(ids) :].tolist()
        ask += [
            (("", ""), ids, best),
            (("", ""), ids, best[:1]),
            (("", ""), ids, [*best[:2], (best[2] + 1) % 99]),
        ]
    got, want = (
        lm._loglikelihood_tokens(ask) for lm in (ours(streamed, tokenizer), theirs(resident, tokenizer))
    )
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want] == [True, True, False] * 3
    assert [value for value, _ in got] == pytest.approx([value for value, _ in want], rel=1e-4)


def test_without_the_adapter_they_are_those_of_the_base(
    resident: PeftModel, streamed: PeftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    ask = requests(
        "loglikelihood", [(c, f" {a}") for c, a in zip(texts(5, 9), texts(5, 4, seed=1), strict=True)]
    )
    on = ours(streamed, tokenizer).loglikelihood(ask)
    with without_adapter(streamed):
        off = ours(streamed, tokenizer).loglikelihood(ask)
    with resident.disable_adapter():
        want = theirs(resident, tokenizer).loglikelihood(ask)
    assert [value for value, _ in off] == pytest.approx([value for value, _ in want], rel=1e-4)
    assert [value for value, _ in on] != pytest.approx([value for value, _ in want], rel=1e-2)


def test_rolling_log_likelihoods_equal_those_of_the_resident_class(
    resident: PeftModel, streamed: PeftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    ask = requests(
        "loglikelihood_rolling",
        [(text,) for text in [*texts(4, 60), *texts(2, 5), "hello world " * 50, "", "<|im_end|>"]],
    )
    got = ours(streamed, tokenizer).loglikelihood_rolling(ask)
    assert got == pytest.approx(theirs(resident, tokenizer).loglikelihood_rolling(ask), rel=1e-4)
    assert max(len(tokenizer(request.args[0])["input_ids"]) for request in ask) > 2 * MAX_LENGTH


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9, 11])
def test_windows_predict_every_token_once_as_those_of_the_harness(count: int) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    ids = list(range(10, 10 + count))
    made = rolling_windows(ids, 1, 4)
    assert [token for _, predicted in made for token in predicted] == ids
    want = get_rolling_token_windows(ids, prefix_token=1, max_seq_len=4, context_len=1)
    assert made == [make_disjoint_window(window) for window in want]


def test_generation_equals_that_of_the_resident_class(
    resident: PeftModel, streamed: PeftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    asked = [{"until": ["\n", "."], "max_gen_toks": 9}, {"until": [], "max_gen_toks": 5, "do_sample": False}]
    contexts = [*texts(4, 9), "hello world " * 30]
    ask = requests("generate_until", [(text, asked[i % 2]) for i, text in enumerate(contexts)])
    got = ours(streamed, tokenizer).generate_until(ask)
    assert got == theirs(resident, tokenizer).generate_until(ask)
    assert any(got)


def test_requests_share_passes_over_the_weights(
    streamed: PeftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = airtune.stream_of(streamed)

    def visits(arguments: list[tuple[object, ...]]) -> float:
        before = stream.counters()["visits"]
        ours(streamed, tokenizer, batch_tokens=10_000).loglikelihood(requests("loglikelihood", arguments))
        return stream.counters()["visits"] - before

    pairs = [(text, " yes no") for text in texts(20, 9)]
    assert visits(pairs) == visits(pairs[:1]) == 3


def test_what_cannot_be_scored_is_refused(streamed: PeftModel, tokenizer: PreTrainedTokenizerFast) -> None:
    model = ours(streamed, tokenizer)
    with pytest.raises(ValueError, match=r"a continuation of 41; expected .* at most 40"):
        model._loglikelihood_tokens([(("", ""), [5], [6] * (MAX_LENGTH + 1))])
    with pytest.raises(ValueError, match="a context of 0 tokens"):
        model._loglikelihood_tokens([(("", ""), [], [6])])
    with pytest.raises(ValueError, match="a task generates 40 tokens"):
        model.generate_until(requests("generate_until", [("a", {"until": [], "max_gen_toks": MAX_LENGTH})]))


# --- tasks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks of each kind, over documents of their own."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [
        {"question": q, "choices": ["yes", "no", "two"], "answer": i % 3} for i, q in enumerate(texts(6, 8))
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    shared: dict[str, object] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}\nAnswer:",
    }
    kinds: dict[str, dict[str, object]] = {
        "tiny_choice": {
            "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer",
        },
        "tiny_answer": {
            "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match"}],
        },
        "tiny_text": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    }  # fmt: skip
    for name, own in kinds.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**shared, "task": name, **own}))
    return folder


# The harness's own doings: a file of its own that it leaves open, and a deprecated way to copy an array.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_tasks_have_the_results_of_the_resident_class(
    resident: PeftModel,
    streamed: PeftModel,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    names = ["tiny_choice", "tiny_answer", "tiny_text"]
    manager = open_tasks(names, str(tasks))
    chats = tokenizer.bos_token is None  # each way with one of the tokenizers
    got, want = (
        run_tasks(lm, manager, names, num_fewshot=None, limit=3 if chats else None, apply_chat_template=chats)
        for lm in (ours(streamed, tokenizer), theirs(resident, tokenizer))
    )
    assert got.keys() == set(names)
    assert "acc" in got["tiny_choice"] and "word_perplexity" in got["tiny_text"]
    for name in names:
        assert got[name] == pytest.approx(want[name], rel=1e-4, nan_ok=True)


def test_a_task_that_is_none_is_said_with_the_closest_one(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    def few_tasks(include_path: str, include_defaults: bool = True) -> TaskManager:
        """The harness's own are thousands, and reading them takes seconds."""
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", few_tasks)
    with pytest.raises(ValueError, match="no task 'tiny_choise'; did you mean 'tiny_choice'"):
        open_tasks(["tiny_choice", "tiny_choise"], str(tasks))


def test_without_the_harness_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ValueError, match=r"pip install 'airtune\[eval\]'"):
        open_tasks(["arc_easy"], None)
