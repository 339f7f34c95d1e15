"""A tokenizer from the hub, or a word about why not, at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from airtune.run import loading

ID = "nobody/such-model"


def raising(error: Exception):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries would ask again for most of a minute."""
    monkeypatch.setattr(loading, "get_hf_file_metadata", raising(HTTPError("no route")))
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", raising(AssertionError("not reached")))
    with pytest.raises(ValueError, match=rf"model\.path={ID}: there is no such folder in .*: no route"):
        loading.load_tokenizer(ID, trust_remote_code=False)


def test_what_is_cached_or_answered_is_left_to_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", raising(OSError("gated")))
    answer = SimpleNamespace(headers={}, request=None)
    monkeypatch.setattr(loading, "get_hf_file_metadata", raising(HfHubHTTPError("401", response=answer)))
    with pytest.raises(ValueError, match="gated"):
        loading.load_tokenizer(ID, trust_remote_code=False)
    monkeypatch.setattr(loading, "get_hf_file_metadata", raising(AssertionError("not reached")))
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda *args, **kwargs: "config.json")
    with pytest.raises(ValueError, match="gated"):
        loading.load_tokenizer(ID, trust_remote_code=False)


def test_a_folder_without_an_adapter_is_refused_before_data_is_read(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"adapter\.path: there is no adapter_config\.json in .*none"):
        loading.find_adapter(str(tmp_path / "none"))
    loading.find_adapter(None)
