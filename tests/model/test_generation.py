"""The streamed model generates what the resident one does, with every kind of cache and way to decode; and it
reads no more, and holds no more, than it must.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, StoppingCriteriaList

import airtune
from airtune.autograd import hops
from airtune.model.generation import able_to_generate
from airtune.weights import pinned
from airtune.weights.file_map import FileMap
from tests import zoo
from tests.sim import Simulator
from tests.twins import adapter, lora, resident, streamed

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def padded(rows: int, length: int = 8) -> dict[str, Tensor]:
    """Prompts of unequal lengths, padded on the left."""
    input_ids = zoo.random_ids(rows, length)
    attention_mask = torch.ones_like(input_ids)
    for row in range(rows):
        attention_mask[row, : 2 * row] = 0
    return {"input_ids": input_ids.masked_fill(attention_mask == 0, 0), "attention_mask": attention_mask}


def base_twin(name: str, folder: Path) -> PreTrainedModel:
    """The resident model without an adapter, its experts one by one as they are when streamed."""
    model = zoo.model_class(name).from_pretrained(folder, dtype=torch.float32)
    model.set_experts_implementation("eager")
    return model.eval()


def both(name: str, tmp_path: Path, **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(resident, streamed), without an adapter."""
    folder = zoo.make(name, tmp_path)
    got: PreTrainedModel = airtune.load(folder, device="cpu", **options).eval()  # type: ignore[assignment]
    return base_twin(name, folder), got


def answer(model: nn.Module, prompt: dict[str, Tensor], **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Greedy tokens, and the logits of each step."""
    out = model.generate(**prompt, **GREEDY, output_logits=True, return_dict_in_generate=True, **options)  # type: ignore[operator]
    return out.sequences, out.logits


def assert_same_answer(got: nn.Module, twin: nn.Module, prompt: dict[str, Tensor], **options: Any) -> None:
    assert_equal(answer(got, prompt, **options), answer(twin, prompt, **options))


def assert_equal(got: tuple[Tensor, tuple[Tensor, ...]], want: tuple[Tensor, tuple[Tensor, ...]]) -> None:
    assert torch.equal(got[0], want[0])
    for mine, theirs in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_tokens_and_logits_of_every_kind_of_decoder(tmp_path: Path, name: str) -> None:
    """Batch 1, and 4 padded on the left; these also without the adapter."""
    folder = zoo.make(name, tmp_path)
    twin, got = resident(name, folder).eval(), streamed(name, folder).eval()
    # Its auxiliary loss wants router logits for the whole mask: transformers' own generation fails at that.
    options = {"output_router_logits": False} if name == "mixtral" else {}
    assert got.device == got.get_base_model().device == torch.device("cpu")
    for prompt in (padded(1), padded(4)):
        assert_same_answer(got, twin, prompt, **options)
    with got.disable_adapter(), twin.disable_adapter():
        assert_same_answer(got, twin, padded(4), **options)


def test_the_device_is_honest_where_the_first_parameter_is_streamed(tmp_path: Path) -> None:
    """As in models whose layers come before their embedding."""
    sizes = {"vocab_size": 384, "hidden_size": 32, "num_attention_heads": 2, "dim_head": 16, "dim_ff": 64}
    config = transformers.CpmAntConfig(**sizes, num_hidden_layers=2, prompt_types=2, prompt_length=4)  # type: ignore[arg-type]
    transformers.CpmAntForCausalLM(config).save_pretrained(tmp_path)
    model = airtune.load(tmp_path, device="cpu")
    assert next(model.parameters()).is_meta
    assert model.device == torch.device("cpu") and isinstance(model, transformers.CpmAntForCausalLM)
    airtune.stream_of(model).close()
    assert type(model) is transformers.CpmAntForCausalLM


CACHES: list[dict[str, Any]] = [
    {"cache_implementation": "dynamic"},
    {"cache_implementation": "static"},
    {"cache_implementation": "offloaded"},
    {"cache_implementation": "quantized"},  # by a package that may not be there
    {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    {"use_cache": False},
]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_5__vl", "mamba2", "kimi_linear"])
def test_every_kind_of_cache(tmp_path: Path, name: str) -> None:
    """Full, sliding, hybrid and recurrent ones. What the resident model refuses is refused in its words."""
    twin, got = both(name, tmp_path)
    for cache in CACHES:
        try:
            want = answer(twin, padded(4), **cache)
        except (AssertionError, ImportError, RuntimeError, ValueError) as refusal:
            with pytest.raises(type(refusal), match=re.escape(str(refusal)[:60])):
                answer(got, padded(4), **cache)
        else:
            assert_equal(answer(got, padded(4), **cache), want)


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "beams, several": {"num_beams": 4, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "prompt in chunks": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen3_5__vl"])
def test_every_way_to_decode(tmp_path: Path, name: str, way: str) -> None:
    twin, got = both(name, tmp_path)
    texts = []
    for model in (twin, got):
        torch.manual_seed(3)
        texts.append(model.generate(**padded(2), **{**GREEDY, **WAYS[way]}))  # type: ignore[operator]
    assert torch.equal(*texts)


def test_streamers_and_stopping_criteria(tmp_path: Path) -> None:
    _, got = both("llama", tmp_path)
    whole = got.generate(**padded(1), **GREEDY)[0]  # type: ignore[operator]

    class Heard(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.ids: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.ids += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    def after_two(ids_BS: Tensor, scores: object, **_: object) -> Tensor:
        return torch.full((len(ids_BS),), ids_BS.shape[1] >= 10)

    heard = Heard()
    options = {**GREEDY, "min_new_tokens": None}
    got.generate(**padded(1), **options, streamer=heard, stopping_criteria=StoppingCriteriaList([after_two]))  # type: ignore[operator]
    assert heard.ended and heard.ids == whole[:10].tolist()


def test_a_conversation_goes_on_with_its_cache(tmp_path: Path) -> None:
    """The cache of one call is given to the next, which then reads only what is new."""
    twin, got = both("gemma2", tmp_path)
    texts = []
    for model in (twin, got):
        first = model.generate(**padded(1), **GREEDY, return_dict_in_generate=True)  # type: ignore[operator]
        more = torch.cat([first.sequences, zoo.random_ids(1, 3, seed=5)], dim=1)
        texts.append(model.generate(input_ids=more, cache=first.cache, **GREEDY))  # type: ignore[operator]
    assert torch.equal(*texts)


def passes(model: nn.Module, **options: Any) -> tuple[Tensor, int]:
    """The tokens, and how often all layers were visited for them."""
    stream = airtune.stream_of(model)
    before = stream.counters()["visits"]
    out = model.generate(**options, max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None)  # type: ignore[operator]
    return out, int(stream.counters()["visits"] - before) // len(stream._layers)


def test_guesses_save_passes_over_the_weights(tmp_path: Path) -> None:
    """From an assistant, and from the text so far: the same tokens, several to a pass."""
    twin, got = both("llama", tmp_path)
    twin.generation_config.assistant_confidence_threshold = (
        0  # what it guesses is right, however unsure it is
    )
    alone, one_by_one = passes(got, **padded(1))
    assert one_by_one == 24
    text, count = passes(got, **padded(1), assistant_model=twin)
    assert torch.equal(text, alone) and count <= 24 / 3
    again = torch.cat([alone, alone[:, 8:12]], dim=1)  # its own words a second time
    plain, _ = passes(got, input_ids=again, attention_mask=torch.ones_like(again))
    text, count = passes(
        got, input_ids=again, attention_mask=torch.ones_like(again), prompt_lookup_num_tokens=4
    )
    assert torch.equal(text, plain) and count < 24


def test_a_token_reads_each_weight_once_for_the_whole_batch(tmp_path: Path) -> None:
    folder = zoo.make("llama", tmp_path)
    read = []
    for rows in (1, 4):
        model = airtune.load(
            folder, device="cpu", host_memory="450kB"
        ).eval()  # two layers of 148 kB, and the head
        stream = airtune.stream_of(model)
        model.generate(**padded(rows), **GREEDY)  # type: ignore[operator]
        read.append(stream.counters()["bytes_read"])
        assert stream.counters()["visits"] == 6 * 4
    assert read[0] == read[1] <= 6 * 4 * stream._residency.layer_nbytes


@pytest.mark.parametrize(("host_memory", "places"), [("350kB", 1), ("520kB", 2), ("670kB", 3), (None, 4)])
def test_host_memory_says_how_many_layers_stay(tmp_path: Path, host_memory: str | None, places: int) -> None:
    twin, got = both("llama", tmp_path, host_memory=host_memory)
    assert_same_answer(got, twin, padded(4))
    assert len(airtune.stream_of(got)._residency._present) == places


def mapped_nbytes(folder: Path) -> int:
    """Pages of the folder's files that this process holds in memory."""
    counting, kb = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counting = str(folder) in line
        elif counting and line.startswith("Rss:"):
            kb += int(line.split()[1])
    return kb * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_mapped_pages_stay_inside_host_memory(tmp_path: Path) -> None:
    """Layers, head and the rows of the table that a pass touches; 8 layers of 590 kB, 410 kB for each of the
    others.
    """
    sizes = {"vocab_size": 800, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(**{**zoo.ZOO["llama"].config, **sizes})  # type: ignore[arg-type]
    made = zoo.model_class("llama")._from_config(config)
    made.save_pretrained(tmp_path)
    model = airtune.load(tmp_path, device="cpu", host_memory="2.5MB").eval()
    stream, seen = airtune.stream_of(model), []
    stream.observers.append(lambda visit: seen.append(mapped_nbytes(tmp_path)))
    model.generate(**padded(4), **GREEDY)  # type: ignore[operator]
    assert 1_000_000 < max(seen) <= 2_500_000 + 2**16  # a page that two tensors share stays with the other
    assert stream._residency.places > 1
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) > 4_000_000


def test_training_gives_back_what_generation_kept(tmp_path: Path) -> None:
    folder = zoo.make("llama", tmp_path)
    model = streamed("llama", folder)
    stream = airtune.stream_of(model)
    model.eval().generate(**padded(1), **GREEDY)
    assert (
        len(stream._residency._present) == 4 and stream.places.head is not None and stream.places.head.stays
    )
    ids_BS = zoo.random_ids(2, 8)
    model.train()(input_ids=ids_BS, labels=ids_BS).loss.backward()
    assert len(stream._residency._present) == 2 and not stream.places.head.stays


def test_layers_stay_only_as_far_as_memory_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, got = both("llama", tmp_path)
    stream = airtune.stream_of(got)
    room = 3.5 * stream._residency.layer_nbytes / 0.9
    monkeypatch.setattr("airtune.model.places.available_memory_nbytes", lambda: int(room))
    got.generate(**padded(1), **GREEDY)  # type: ignore[operator]
    assert len(stream._residency._present) == 3


def test_pages_that_the_kernel_took_back_are_read_ahead_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers that stay, by the background thread and not by faults in the middle of a product."""
    _, got = both("llama", tmp_path)
    stream = airtune.stream_of(got)
    first = got.generate(**padded(1), **GREEDY)  # type: ignore[operator]
    before = stream.counters()["bytes_read"]
    assert torch.equal(got.generate(**padded(1), **GREEDY), first)  # type: ignore[operator]
    assert stream.counters()["bytes_read"] == before, "nothing is read while all of it is there"
    lacking = stream._residency._images[2].mapped_ranges()
    monkeypatch.setattr(FileMap, "lacks", lambda files, ranges: list(ranges) == lacking)
    assert torch.equal(got.generate(**padded(1), **GREEDY), first)  # type: ignore[operator]
    assert stream.counters()["bytes_read"] - before == 6 * stream._residency._images[2].mapped_nbytes


# On an accelerator


def streamed_on_sim(folder: Path, **options: Any) -> PreTrainedModel:
    return airtune.load(folder, device="sim", dtype=torch.float32, poison=True, **options).eval()  # type: ignore[return-value]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_same_tokens_on_an_accelerator(sim: Simulator, tmp_path: Path, cache: str) -> None:
    folder = zoo.make("llama", tmp_path)
    got, twin = streamed_on_sim(folder), base_twin("llama", folder)
    assert got.device == torch.device("cpu")
    assert_same_answer(got, twin, padded(4), cache_implementation=cache)


def test_device_memory_keeps_layers_from_the_second_pass_on(sim: Simulator, tmp_path: Path) -> None:
    folder = zoo.make("llama", tmp_path)
    got, twin = streamed_on_sim(folder, device_memory=4_000_000), base_twin("llama", folder)
    stream = airtune.stream_of(got)
    assert_same_answer(got, twin, padded(2))
    before = stream.counters()["bytes_read"]
    assert_same_answer(got, twin, padded(2))
    assert stream._residency.places == 4 and stream.counters()["bytes_read"] == before
    assert stream.places.head is not None
    assert stream.places.head.held_nbytes == stream.places.head.nbytes, "and the head after the layers"


@pytest.mark.parametrize("budget", [900_000, 1_100_000, 1_400_000, 2_500_000])
def test_device_memory_holds_whatever_the_prompt(sim: Simulator, tmp_path: Path, budget: int) -> None:
    """A longer prompt after layers have taken all room, and a cache that grows with each token."""
    sim.reset_peak()
    start = sim.now()
    got = streamed_on_sim(zoo.make("llama", tmp_path), device_memory=budget)
    for length in (4, 16, 48, 8, 100):
        got.generate(input_ids=zoo.random_ids(1, length), **{**GREEDY, "max_new_tokens": 24})  # type: ignore[operator]
        assert sim.peak() - start <= budget
    airtune.stream_of(got).close()


def without_cudas_ways(monkeypatch: pytest.MonkeyPatch, sim: Simulator) -> None:
    """What mps lacks: streams beside the first, pinned memory, memory statistics."""

    def none_here(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("not on this device")

    def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            if pin_memory:
                raise RuntimeError("pinned memory is not available")
            return make(*args, **kwargs)

        return made

    for name in ("memory_stats", "reset_peak_memory_stats", "get_memory_info"):
        monkeypatch.setattr(torch.accelerator, name, none_here)
    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, unpinned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "record_stream", none_here)
    only = torch.accelerator.current_stream(torch.device("sim"))
    monkeypatch.setattr(torch, "Stream", lambda device: only)
    hops.can_pin.cache_clear()
    pinned._can_pin.cache_clear()
    monkeypatch.setattr(hops, "_STREAMS", {})


def test_nothing_assumes_cuda(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = zoo.make("llama", tmp_path)
    twin = base_twin("llama", folder)
    request.addfinalizer(hops.can_pin.cache_clear)
    request.addfinalizer(pinned._can_pin.cache_clear)
    without_cudas_ways(monkeypatch, sim)
    got = streamed_on_sim(folder, device_memory="4MB", host_memory="300kB")
    assert_same_answer(got, twin, padded(4))
    assert airtune.stream_of(got)._residency.places == 2
    tuned = streamed_on_sim(folder, lora=lora("llama")).train()
    ids_BS = zoo.random_ids(2, 8)
    tuned(input_ids=ids_BS, labels=ids_BS).loss.backward()
    assert all(p.grad is not None for p in adapter(tuned).values())


# Modelling code that a repository brings along

OLD_CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class OldConfig(PretrainedConfig):
    model_type = "old_remote"

    def __init__(self, vocab_size=384, hidden_size=32, num_hidden_layers=3, **kwargs):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**kwargs)


class OldBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, mask):
        query, key, value = self.query_key_value(hidden).chunk(3, -1)
        seen = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        seen = seen if mask is None else seen & mask[:, None].bool()
        weights = (query @ key.transpose(1, 2)).masked_fill(~seen, -1e9).softmax(-1)
        return hidden + self.out(weights @ value)


class OldForCausalLM(PreTrainedModel):
    config_class = OldConfig

    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList([OldBlock(config) for _ in range(config.num_hidden_layers)])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def get_output_embeddings(self):
        return self.lm_head
{prepare}
    def forward({arguments}):
        hidden = self.wte(input_ids)
        for block in self.h:
            hidden = block(hidden, attention_mask)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
"""
PREPARE = """
    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}
"""
# A cache that is a tuple, and is there from the second token on.
TUPLES = """
    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        assert past_key_values is None or isinstance(past_key_values, tuple)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}
"""


def old_repository(folder: Path, *, prepare: str, arguments: str) -> Path:
    """A repository with modelling code, and random weights for it."""
    folder.mkdir()
    code = OLD_CODE.replace("{prepare}", prepare).replace("{arguments}", arguments)
    (folder / "modeling_old.py").write_text(textwrap.dedent(code))
    names: dict[str, Any] = {}
    exec(code, names)
    places = {"AutoConfig": "modeling_old.OldConfig", "AutoModelForCausalLM": "modeling_old.OldForCausalLM"}
    torch.manual_seed(0)
    model = names["OldForCausalLM"](names["OldConfig"](architectures=["OldForCausalLM"], auto_map=places))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("prepare", "arguments"),
    [
        (PREPARE, "self, input_ids, attention_mask=None, return_dict=True"),
        ("", "self, input_ids, attention_mask=None, **kwargs"),
        ("", "self, input_ids, attention_mask=None, use_cache=False, return_dict=True"),
        (TUPLES, "self, input_ids, attention_mask=None, past_key_values=None, return_dict=True"),
    ],
    ids=["prepares its inputs", "takes anything", "takes what is needed", "tuples"],
)
def test_code_from_before_the_mixin_generates(tmp_path: Path, prepare: str, arguments: str) -> None:
    """What it would say itself, token by token; and its files are as they were."""
    folder = old_repository(tmp_path / "old", prepare=prepare, arguments=arguments)
    files = {file: file.read_bytes() for file in folder.iterdir()}
    got = airtune.load(folder, device="cpu", trust_remote_code=True).eval()
    assert type(got).__name__ == "OldForCausalLM"
    prompt = padded(2)
    wanted_BS, mask_BS = prompt["input_ids"], prompt["attention_mask"]
    for _ in range(6):
        with torch.no_grad():
            next_B1 = got(input_ids=wanted_BS, attention_mask=mask_BS).logits[:, -1].argmax(-1, keepdim=True)
        wanted_BS = torch.cat([wanted_BS, next_B1], dim=1)
        mask_BS = torch.cat([mask_BS, torch.ones_like(next_B1)], dim=1)
    assert torch.equal(got.generate(**prompt, **GREEDY), wanted_BS)  # type: ignore[operator]
    assert {file: file.read_bytes() for file in files} == files


def test_code_that_cannot_serve_generate_is_refused_by_name(tmp_path: Path) -> None:
    folder = old_repository(tmp_path / "old", prepare="", arguments="self, input_ids, attention_mask=None")
    got = airtune.load(folder, device="cpu", trust_remote_code=True)
    with pytest.raises(
        ValueError, match=r"OldForCausalLM cannot generate.*does not take return_dict, use_cache"
    ):
        got.generate(**padded(1))  # type: ignore[operator]


def test_a_class_that_can_generate_is_left_alone() -> None:
    assert able_to_generate(transformers.LlamaForCausalLM) is transformers.LlamaForCausalLM
