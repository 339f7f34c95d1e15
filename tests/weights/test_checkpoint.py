from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save_file

from airtune.weights.checkpoint import Checkpoint, CheckpointError

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def tensors(*names: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(2, 3, dtype=dtype) for name in names}


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


def write_shards(folder: Path, **weight_map: str) -> None:
    """Two shards, a in the first and b in the second, and an index that says so unless told otherwise."""
    save_file(tensors("a"), folder / SHARD_1)
    save_file(tensors("b"), folder / SHARD_2)
    write_json(folder / INDEX, {"weight_map": {"a": SHARD_1, "b": SHARD_2, **weight_map}})


def refused(path: Path | str, *parts: str, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path, revision=revision)
    for part in (str(path), *parts):
        assert part in str(caught.value)
    return str(caught.value)


# What is accepted


def test_single_file(tmp_path: Path) -> None:
    save_file(
        {"w": torch.zeros(3, 5, dtype=torch.bfloat16), "n": torch.tensor(1)}, tmp_path / "model.safetensors"
    )
    checkpoint = Checkpoint.open(str(tmp_path))
    assert set(checkpoint) == {"w", "n"} and len(checkpoint) == 2 and "x" not in checkpoint
    assert checkpoint["w"].shape == (3, 5) and checkpoint["w"].dtype == torch.bfloat16
    assert checkpoint["n"].shape == () and checkpoint["n"].dtype == torch.int64
    assert checkpoint.nbytes == 30 + 8
    assert checkpoint.folder == tmp_path and checkpoint.files == (tmp_path / "model.safetensors",)


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert {name: checkpoint[name].file.name for name in checkpoint} == {"a": SHARD_1, "b": SHARD_2}
    assert checkpoint.files == (tmp_path / SHARD_1, tmp_path / SHARD_2)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(tensors("a"), tmp_path / "model.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(Checkpoint.open("~")) == ["a"]


def test_links_are_followed_as_the_hub_cache_needs(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(tensors("a"), tmp_path / "blobs" / "0f3c")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0f3c")
    assert list(Checkpoint.open(tmp_path / "snapshot")) == ["a"]


@pytest.mark.parametrize("name", ["consolidated.safetensors", "output.safetensors"])
def test_one_file_of_another_name(tmp_path: Path, name: str) -> None:
    save_file(tensors("a"), tmp_path / name)
    assert list(Checkpoint.open(tmp_path)) == ["a"]


def test_several_files_without_an_index(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "one.safetensors")
    save_file(tensors("b"), tmp_path / "two.safetensors")
    assert set(Checkpoint.open(tmp_path)) == {"a", "b"}


def test_the_single_file_goes_before_an_index_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_shards(tmp_path)
    save_file(tensors("c"), tmp_path / "model.safetensors")
    assert list(Checkpoint.open(tmp_path)) == ["c"]
    assert "reading the former" in caplog.text


def test_files_that_the_index_does_not_mention_are_left_alone(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not looked at")
    assert set(Checkpoint.open(tmp_path)) == {"a", "b"}


def test_model_weights_beside_an_adapter(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "model.safetensors")
    save_file(tensors("lora"), tmp_path / "adapter_model.safetensors")
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "x"})
    assert list(Checkpoint.open(tmp_path)) == ["a"]


def test_revision_of_a_local_folder_is_not_silently_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(tensors("a"), tmp_path / "model.safetensors")
    Checkpoint.open(tmp_path, revision="v2")
    assert "'v2' is not used" in caplog.text


def test_two_hundred_shards_in_a_second(tmp_path: Path) -> None:
    weight_map: dict[str, str] = {}
    for shard in range(200):
        name = f"model-{shard + 1:05}-of-00200.safetensors"
        part = {f"layers.{shard}.experts.{i}.weight": torch.zeros(1) for i in range(50)}
        save_file(part, tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    write_json(tmp_path / INDEX, {"weight_map": weight_map})
    started = time.perf_counter()
    assert len(Checkpoint.open(tmp_path)) == 10_000
    assert time.perf_counter() - started < 5  # 0.2 s alone on two cores; this is for machines that are busy


# Faults of files


def test_faulty_shards_come_in_one_message(tmp_path: Path) -> None:
    write_shards(tmp_path)
    for name in (SHARD_1, SHARD_2):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-3])
    refused(tmp_path, SHARD_1, SHARD_2, "3 bytes are missing")


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    write_shards(tmp_path, c="model-00003-of-00003.safetensors")
    (tmp_path / SHARD_2).unlink()
    refused(tmp_path, "2 of 3 shards are missing", SHARD_2, "model-00003-of-00003.safetensors", "download")


def test_link_to_nothing_is_a_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / SHARD_2).unlink()
    (tmp_path / SHARD_2).symlink_to("blob-that-was-evicted")
    refused(tmp_path, "1 of 2 shards are missing", SHARD_2)


def test_missing_shard_without_an_index(tmp_path: Path) -> None:
    save_file(tensors("b"), tmp_path / "model-00002-of-00003.safetensors")
    refused(
        tmp_path, "2 of 3 shards", SHARD_1.replace("of-00002", "of-00003"), "model-00003-of-00003.safetensors"
    )


def test_index_names_another_file_for_a_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path, a=SHARD_2)
    refused(tmp_path, "1 tensors are not in the file the index gives", f"a ({SHARD_2})", "fetch the index")


def test_tensor_that_the_index_leaves_out(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file(tensors("b", "extra"), tmp_path / SHARD_2)
    refused(tmp_path, "1 tensors are in a file but the index", f"extra ({SHARD_2})")


def test_tensor_in_two_files_of_the_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file(tensors("a", "b"), tmp_path / SHARD_2)
    refused(tmp_path, f"a ({SHARD_2})")


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_index_that_is_none(tmp_path: Path, index: str) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).write_text(index)
    refused(tmp_path, INDEX, "Fetch the file again")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "", ["x"], None]
)
def test_index_that_does_not_point_to_a_file_beside_it(tmp_path: Path, name: object) -> None:
    write_shards(tmp_path)
    write_json(tmp_path / INDEX, {"weight_map": {"a": SHARD_1, "c": name}})
    refused(tmp_path, INDEX, repr(name), "expected plain names")


def test_same_tensor_twice_without_an_index(tmp_path: Path) -> None:
    save_file(tensors("a", "b"), tmp_path / "one.safetensors")
    save_file(tensors("b", "c"), tmp_path / "two.safetensors")
    message = refused(tmp_path, "one.safetensors", "two.safetensors", ": b.", "Keep one set")
    assert "1 tensors are in more than one" in message


def test_no_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    refused(tmp_path, "hold no tensors")


def test_empty_folder(tmp_path: Path) -> None:
    refused(tmp_path, "no weights among no files", "Supported: safetensors")


def test_file_instead_of_a_folder(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", "is a file", f"Give {tmp_path}")


# Formats


def test_adapter_instead_of_a_model(tmp_path: Path) -> None:
    save_file(tensors("lora"), tmp_path / "adapter_model.safetensors")
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "org/base-7b"})
    (tmp_path / "training_args.bin").touch()
    refused(tmp_path, "'org/base-7b'", "model.path", "adapter.path")


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("model-Q4_K_M.gguf", "GGUF"),
        ("pytorch_model.bin", "PyTorch pickle"),
        ("model.pt", "PyTorch pickle"),
        ("consolidated.00.pth", "PyTorch pickle"),
        ("model.ckpt", "PyTorch pickle"),
        ("tf_model.h5", "TensorFlow"),
        ("flax_model.msgpack", "Flax"),
    ],
)
def test_other_formats(tmp_path: Path, name: str, format_name: str) -> None:
    (tmp_path / name).touch()
    refused(tmp_path, format_name, "Supported: safetensors", "save_pretrained")


@pytest.mark.parametrize("method", ["awq", "gptq", "exl2", "fbgemm_fp8", "nvfp4", "quanto", "torchao"])
@pytest.mark.parametrize("where", ["top", "text_config"])
def test_quantised_by_config(tmp_path: Path, method: str, where: str) -> None:
    config: dict[str, object] = {"quantization_config": {"quant_method": method}}
    write_json(tmp_path / "config.json", config if where == "top" else {"text_config": config})
    (tmp_path / "model.safetensors").write_bytes(b"not looked at")
    refused(tmp_path, method, "Supported: safetensors", "unquantised")


@pytest.mark.parametrize("where", ["top", "text_config"])
@pytest.mark.parametrize("method", ["fp8", "mxfp4", "bitsandbytes"])
def test_methods_that_can_be_decoded(tmp_path: Path, method: str, where: str) -> None:
    config: dict[str, object] = {"quantization_config": {"quant_method": method}}
    write_json(tmp_path / "config.json", config if where == "top" else {"text_config": config})
    save_file(tensors("a", dtype=torch.float8_e4m3fn), tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path)["a"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"format": "pack-quantized"}, None),
        ({"format": "float-quantized", "sparsity_config": {"format": "dense"}, "transform_config": {}}, None),
        ({"format": "mixed-precision", "config_groups": {"g": {"format": "pack-quantized"}}}, None),
        ({"format": "pack-quantized", "config_groups": {"g": {"format": None}, "h": {}}}, None),
        ({}, "format None"),
        ({"format": "dense"}, "format dense"),
        ({"format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
        ({"format": "pack-quantized", "config_groups": {"g": {"format": "marlin-24"}}}, "format marlin-24"),
        ({"format": "mixed-precision", "config_groups": {"g": {}}}, "format mixed-precision"),
        ({"format": "pack-quantized", "sparsity_config": {"format": "sparse-24"}}, "sparsity sparse-24"),
        ({"format": "pack-quantized", "transform_config": {"R1": {}}}, "a transform of the activations"),
    ],
)
def test_compressed_tensors_by_what_it_holds(
    tmp_path: Path, settings: dict[str, object], reason: str | None
) -> None:
    scheme = {"quant_method": "compressed-tensors", **settings}
    write_json(tmp_path / "config.json", {"quantization_config": scheme})
    save_file(tensors("a"), tmp_path / "model.safetensors")
    if reason is None:
        assert list(Checkpoint.open(tmp_path)) == ["a"]
    else:
        refused(tmp_path, f"compressed-tensors with {reason} (config.json)", "unquantised")


def test_quantised_by_a_config_without_a_method(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"quantization": {"bits": 4, "group_size": 64}})
    refused(tmp_path, "quantization without quant_method")


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_quantised_by_a_file_beside_config(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / name, {})
    refused(tmp_path, name, "unquantised")


@pytest.mark.parametrize(("ending", "method"), [(".qweight", "gptq or awq"), (".q_weight", "exl2")])
def test_quantised_by_the_names_of_tensors(tmp_path: Path, ending: str, method: str) -> None:
    save_file(tensors("a", f"b{ending}", dtype=torch.int32), tmp_path / "model.safetensors")
    refused(tmp_path, method, f"b{ending}")


def test_config_without_quantisation(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"quantization_config": None, "text_config": {"hidden_size": 8}})
    assert list(Checkpoint.open(tmp_path)) == ["a"]


def test_broken_config(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json", "not JSON")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex64])
def test_storage_dtype_that_cannot_be_streamed(tmp_path: Path, dtype: torch.dtype) -> None:
    """fp8 is for those whose config says how it is decoded."""
    save_file(
        {"a": torch.zeros(1), "q": torch.zeros(8, dtype=torch.uint8).view(dtype)},
        tmp_path / "model.safetensors",
    )
    why = "1 tensors are of a dtype that cannot be streamed without a quantization_config in config.json"
    refused(tmp_path, f"{why}: q ({dtype})", "bfloat16, float16, float32")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.complex64])
def test_storage_dtype_of_no_scheme(tmp_path: Path, dtype: torch.dtype) -> None:
    write_json(tmp_path / "config.json", {"quantization_config": {"quant_method": "fp8"}})
    save_file({"q": torch.zeros(8, dtype=torch.uint8).view(dtype)}, tmp_path / "model.safetensors")
    refused(tmp_path, f"1 tensors are of a dtype that cannot be streamed: q ({dtype})")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("buffer", [torch.bool, torch.int64, torch.int32, torch.uint8])
def test_storage_dtypes_that_can(tmp_path: Path, dtype: torch.dtype, buffer: torch.dtype) -> None:
    save_file(tensors("w", dtype=dtype) | tensors("n", dtype=buffer), tmp_path / "model.safetensors")
    assert {stored.dtype for stored in Checkpoint.open(tmp_path).values()} == {dtype, buffer}


# The hub


class FakeHub:
    """A repository in a folder. `snapshot_download` shows what is asked for, as a cache would after it."""

    def __init__(self, remote: Path, cache: Path) -> None:
        self.remote, self.cache = remote, cache
        self.downloaded: set[str] = set()
        self.revisions: set[str | None] = set()
        self.listing_error: Exception | None = None
        self.download_error: Exception | None = None

    def list_repo_files(self, repo_id: str, *, revision: str | None = None) -> list[str]:
        if self.listing_error is not None:
            raise self.listing_error
        return sorted(str(f.relative_to(self.remote)) for f in self.remote.rglob("*") if f.is_file())

    def snapshot_download(
        self, repo_id: str, *, revision: str | None = None, allow_patterns: Sequence[str] = ()
    ) -> str:
        if self.download_error is not None:
            raise self.download_error
        self.revisions.add(revision)
        names = huggingface_hub.utils.filter_repo_objects(
            sorted(str(f.relative_to(self.remote)) for f in self.remote.rglob("*") if f.is_file()),
            allow_patterns=list(allow_patterns),
        )
        for name in names:
            self.downloaded.add(name)
            (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
            (self.cache / name).write_bytes((self.remote / name).read_bytes())
        return str(self.cache)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "remote", tmp_path / "cache")
    fake.remote.mkdir()
    fake.cache.mkdir()
    monkeypatch.setattr(huggingface_hub, "list_repo_files", fake.list_repo_files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return fake


def test_hub_downloads_what_is_needed_and_no_second_copy(hub: FakeHub) -> None:
    write_shards(hub.remote)
    for name in ("config.json", "chat_template.jinja", "tokenizer.model", "merges.txt", "modeling.py"):
        (hub.remote / name).write_text("{}")
    (hub.remote / "consolidated.safetensors").write_bytes(b"the same weights once more")
    (hub.remote / "original").mkdir()
    (hub.remote / "original" / "model.safetensors").write_bytes(b"and again")
    checkpoint = Checkpoint.open("org/name", revision="v2")
    assert set(checkpoint) == {"a", "b"} and checkpoint.folder == hub.cache
    expected = {
        SHARD_1,
        SHARD_2,
        INDEX,
        "config.json",
        "chat_template.jinja",
        "tokenizer.model",
        "merges.txt",
    }
    assert hub.downloaded == expected
    assert hub.revisions == {"v2"}


def test_hub_code_comes_only_when_asked_for(hub: FakeHub) -> None:
    save_file(tensors("a"), hub.remote / "model.safetensors")
    (hub.remote / "modeling.py").touch()
    Checkpoint.open("org/name", include_code=True)
    assert hub.downloaded == {"model.safetensors", "modeling.py"}


def test_local_folder_goes_before_the_hub(hub: FakeHub) -> None:
    Path("org/name").mkdir(parents=True)
    save_file(tensors("a"), "org/name/model.safetensors")
    hub.listing_error = hub.download_error = AssertionError("the hub was asked")
    assert list(Checkpoint.open("org/name")) == ["a"]


def write_gguf(folder: Path) -> None:
    (folder / "model-Q4.gguf").touch()
    (folder / "README.md").touch()


def write_awq(folder: Path) -> None:
    save_file(tensors("a"), folder / "model.safetensors")
    write_json(folder / "config.json", {"quantization_config": {"quant_method": "awq"}})


def write_incomplete(folder: Path) -> None:
    write_shards(folder)
    (folder / SHARD_2).unlink()


@pytest.mark.parametrize(
    ("write", "says"), [(write_gguf, "GGUF"), (write_awq, "awq"), (write_incomplete, SHARD_2)]
)
def test_hub_repository_is_refused_before_its_weights_are_downloaded(
    hub: FakeHub, write: Callable[[Path], None], says: str
) -> None:
    write(hub.remote)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open("org/name")
    assert not any(name.endswith((".safetensors", ".gguf")) for name in hub.downloaded)


def test_hub_offline_uses_what_the_cache_holds(hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    save_file(tensors("a"), hub.cache / "model.safetensors")
    (hub.remote / "config.json").write_text("{}")
    hub.listing_error = OfflineModeIsEnabled("offline")
    with caplog.at_level(logging.WARNING):
        assert list(Checkpoint.open("org/name")) == ["a"]
    assert "using the cache" in caplog.text


def hub_error(kind: type[Exception]) -> Exception:
    """As the hub raises it; its constructor wants a response, which the handling does not look at."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (GatedRepoError, "HF_TOKEN"),
        (RepositoryNotFoundError, "no such repository on the hub"),
        (RevisionNotFoundError, "no such revision"),
    ],
)
@pytest.mark.parametrize("step", ["listing_error", "download_error"])
def test_hub_refusals_say_what_to_do(hub: FakeHub, kind: type[Exception], says: str, step: str) -> None:
    setattr(hub, step, hub_error(kind))
    refused("org/name", "at revision v2", says, revision="v2")


def test_hub_says_why_its_list_cannot_be_had(hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    save_file(tensors("a"), hub.cache / "model.safetensors")
    hub.listing_error = HTTPError("403 Forbidden: the token may not read this")
    assert list(Checkpoint.open("org/name")) == ["a"]
    assert "403 Forbidden: the token may not read this" in caplog.text


def test_hub_download_that_breaks_off(hub: FakeHub) -> None:
    hub.download_error = HTTPError("the peer closed the connection")
    refused("org/name", "the download stopped (HTTPError: the peer closed the connection)", "Start again")


def test_hub_offline_and_not_in_the_cache(hub: FakeHub) -> None:
    hub.listing_error = OfflineModeIsEnabled("offline")
    hub.download_error = LocalEntryNotFoundError("nothing")
    refused("org/name", "not in the local cache", "HF_HUB_OFFLINE")


@pytest.mark.parametrize("path", ["/no/such/folder", "./name", "a/b/c", "has space/x"])
def test_what_can_be_neither_folder_nor_hub_id(hub: FakeHub, path: str) -> None:
    hub.listing_error = hub.download_error = AssertionError("the hub was asked")
    refused(path, "no such folder", "not a hub id")
