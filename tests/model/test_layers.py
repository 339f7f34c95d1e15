"""The decoder layers of any model are found, and nothing else is taken for one."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from airtune.model.layers import find_layers
from tests import zoo


def on_meta(name: str) -> PreTrainedModel:
    cls = zoo.model_class(name)
    with init_empty_weights():
        return cls._from_config(cast(type, cls.config_class)(**zoo.ZOO[name].config))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_kind_of_decoder(name: str) -> None:
    model = on_meta(name)
    path = zoo.ZOO[name].layers
    stack = cast(nn.ModuleList, model.get_submodule(path))
    found = find_layers(model)
    assert list(found) == [f"{path}.{i}" for i in range(len(stack))]
    assert all(layer is module for layer, module in zip(found.values(), stack, strict=True))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_what_is_found_is_most_of_the_decoder(name: str) -> None:
    model = on_meta(name)
    tables = {
        p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    head = model.get_output_embeddings()
    tables |= set(head.parameters())
    tower = {p for n, p in model.named_parameters() if "visual" in n or "vision" in n or "projector" in n}
    rest = set(model.parameters()) - tables - tower
    layers = {p for layer in find_layers(model).values() for p in layer.parameters()}
    assert sum(p.numel() for p in layers & rest) > 0.9 * sum(p.numel() for p in rest)


# --- models that are like none of the zoo's -----------------------------------------------------------------


class Block(GradientCheckpointingLayer):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


def llama(**modules: nn.Module) -> LlamaForCausalLM:
    """A model whose decoder holds `modules` in place of its layers."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    del model.model.layers
    for name, module in modules.items():
        model.model.add_module(name, module)
    return model


def stack(*widths: int) -> nn.ModuleList:
    return nn.ModuleList([Block(width) for width in widths])


def linears(*widths: int) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(width, width) for width in widths])


def test_two_stacks_in_their_order() -> None:
    found = find_layers(llama(early=stack(16, 16), late=stack(16)))
    assert list(found) == ["model.early.0", "model.early.1", "model.late.0"]


def test_a_short_list_of_small_blocks_stays() -> None:
    assert list(find_layers(llama(blocks=stack(32, 32), tail=stack(8)))) == [
        "model.blocks.0",
        "model.blocks.1",
    ]


def test_a_list_of_projections_is_no_stack() -> None:
    found = find_layers(llama(projections=linears(64, 64), blocks=stack(32, 32)))
    assert list(found) == ["model.blocks.0", "model.blocks.1"]


def test_layers_of_a_kind_of_their_own_are_found_too() -> None:
    """Models with remote code may not use transformers' base class."""
    assert list(find_layers(llama(h=linears(16, 16)))) == ["model.h.0", "model.h.1"]


def test_a_list_inside_a_layer_is_part_of_it() -> None:
    layers = stack(16, 16)
    for layer in layers:
        layer.add_module("experts", stack(64, 64))
    assert list(find_layers(llama(layers=layers))) == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("tower", ["vision_tower", "visual", "audio_tower", "perceiver"])
def test_a_heavy_tower_is_left_alone(tower: str) -> None:
    encoder = nn.Module()
    encoder.add_module("layers", stack(64, 64))
    assert list(find_layers(llama(**{tower: encoder, "layers": stack(16)}))) == ["model.layers.0"]


def test_weights_need_not_be_there() -> None:
    with torch.device("meta"):
        model = llama(layers=stack(16, 16))
    assert list(find_layers(model)) == ["model.layers.0", "model.layers.1"]


def test_a_model_without_layers_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no list of decoder layers"):
        find_layers(llama(block=Block(), empty=nn.ModuleList()))
