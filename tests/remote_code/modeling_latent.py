"""A decoder whose code travels with its weights, and that does what transformers' own decoders do not:

* its layers sit under `language_model.model`, in a model that also has a vision tower and a projector;
* a layer hands on a list of earlier hidden states, and reads a learned mixture of all of them;
* experts are modules in a `ModuleList`, and work in a latent of half the model's width;
* its imports and the name of its cache are those of an older transformers.

Shape legend: B batch, S sequence, N = B * S tokens, D model width, L latent width, E experts.
"""

# mypy: ignore-errors
# (names and arguments of an older transformers)

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import OutputRecorder, check_model_inputs

from .configuration_latent import LatentConfig, LatentTextConfig, LatentVisionConfig


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, 1e-6)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class Router(nn.Module):
    def __init__(self, config: LatentTextConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE = F.linear(hidden_ND.float(), self.weight.float())
        scores_NE = logits_NE.sigmoid()
        chosen = (scores_NE + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores_NE.gather(1, chosen)
        return logits_NE, chosen, (weights / weights.sum(-1, keepdim=True)).to(hidden_ND.dtype)


class LatentMoe(nn.Module):
    def __init__(self, config: LatentTextConfig) -> None:
        super().__init__()
        width, latent, inner = config.hidden_size, config.moe_latent_size, config.moe_intermediate_size
        self.gate = Router(config)
        self.down_to_latent = nn.Linear(width, latent, bias=False)
        self.experts = nn.ModuleList(Mlp(latent, inner) for _ in range(config.num_experts))
        self.up_from_latent = nn.Linear(latent, width, bias=False)
        self.shared_experts = Mlp(width, inner)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        hidden_ND = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
        _, chosen, weights = self.gate(hidden_ND)
        latent_NL = self.down_to_latent(hidden_ND)
        mixed_NL = torch.zeros_like(latent_NL)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=len(self.experts)).tolist()
        for number, own in enumerate(order.split(counts)):
            if len(own):
                tokens = own // chosen.shape[1]
                made = self.experts[number](latent_NL[tokens]) * weights.view(-1)[own, None]
                mixed_NL = mixed_NL.index_add(0, tokens, made)
        return self.up_from_latent(mixed_NL).view_as(hidden_BSD) + self.shared_experts(hidden_BSD)


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    weights = (query @ key.mT * scaling + mask).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class Attention(nn.Module):
    is_causal = True

    def __init__(self, config: LatentTextConfig, layer_idx: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.head_dim = config.num_attention_heads, width // config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, hidden_BSD: Tensor, mask: Tensor, past_key_values: Cache | None) -> Tensor:
        batch, length, _ = hidden_BSD.shape
        query, key, value = (
            projection(hidden_BSD).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        kind = self.config._attn_implementation
        attend = eager if kind == "eager" else ALL_ATTENTION_FUNCTIONS[kind]
        mixed, _ = attend(self, query, key, value, mask, scaling=self.head_dim**-0.5)
        return self.o_proj(mixed.reshape(batch, length, -1))


class Residual(nn.Module):
    """A mixture of earlier hidden states, by attention over them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.proj = Norm(width), nn.Linear(width, 1, bias=False)

    def forward(self, earlier: Any, latest_BSD: Tensor) -> Tensor:
        return mixture([*earlier, latest_BSD], self.norm, self.proj)


def mixture(states: list[Tensor], norm: nn.Module, proj: nn.Module) -> Tensor:
    stacked = torch.stack(states)
    return (proj(norm(stacked)).softmax(0) * stacked).sum(0)


class DecoderLayer(nn.Module):
    def __init__(self, config: LatentTextConfig, layer_idx: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.begins_block = layer_idx % config.residual_block_size == 0
        self.as_stack = config.residuals == "stack"
        self.self_attn = Attention(config, layer_idx)
        self.self_attention_res, self.mlp_res = Residual(width), Residual(width)
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        if layer_idx == 0:
            self.mlp = Mlp(width, config.intermediate_size)
        else:
            self.block_sparse_moe = LatentMoe(config)

    def forward(
        self, earlier: Any, latest_BSD: Tensor, mask: Tensor, past_key_values: Cache | None = None
    ) -> tuple[Any, Tensor]:
        hidden_BSD = self.self_attention_res(earlier, latest_BSD)
        if self.begins_block and self.as_stack:
            earlier, latest_BSD = torch.cat([earlier, latest_BSD[None]]), torch.zeros_like(latest_BSD)
        elif self.begins_block:
            earlier, latest_BSD = [*earlier, latest_BSD], torch.zeros_like(latest_BSD)
        latest_BSD = latest_BSD + self.self_attn(self.input_layernorm(hidden_BSD), mask, past_key_values)
        hidden_BSD = self.post_attention_layernorm(self.mlp_res(earlier, latest_BSD))
        feed_forward = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return earlier, latest_BSD + feed_forward(hidden_BSD)


class LatentPreTrainedModel(PreTrainedModel):
    config_class = LatentConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=0.02)


class LatentTextModel(LatentPreTrainedModel):
    config_class = LatentTextConfig
    _can_record_outputs: ClassVar = {"router_logits": OutputRecorder(Router, index=0)}

    def __init__(self, config: LatentTextConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.output_attn_res_norm, self.output_attn_res_proj = Norm(width), nn.Linear(width, 1, bias=False)
        self.norm = Norm(width)
        self.post_init()

    @check_model_inputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        latest_BSD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        mask = causal_mask(latest_BSD, seen, attention_mask)
        earlier: Any = (
            latest_BSD.new_empty((0, *latest_BSD.shape)) if self.config.residuals == "stack" else []
        )
        for layer in self.layers:
            earlier, latest_BSD = layer(earlier, latest_BSD, mask, past_key_values=past_key_values)
        hidden = mixture([*earlier, latest_BSD], self.output_attn_res_norm, self.output_attn_res_proj)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)


def causal_mask(hidden_BSD: Tensor, seen: int, attention_mask: Tensor | None) -> Tensor:
    batch, length, _ = hidden_BSD.shape
    allowed = torch.ones(length, seen + length, dtype=torch.bool, device=hidden_BSD.device).tril(seen)
    allowed = allowed.expand(batch, 1, -1, -1)
    if attention_mask is not None:
        # A row that begins with padding sees itself: nothing reads what comes of it.
        itself = torch.eye(length, seen + length, dtype=torch.bool, device=hidden_BSD.device).roll(seen, 1)
        allowed = allowed & attention_mask[:, None, None, :].bool() | itself
    return torch.where(allowed, 0.0, torch.finfo(hidden_BSD.dtype).min).to(hidden_BSD.dtype)


class LatentForCausalLM(LatentPreTrainedModel, GenerationMixin):
    config_class = LatentTextConfig

    def __init__(self, config: LatentTextConfig) -> None:
        super().__init__(config)
        self.model = LatentTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, labels: Tensor | None = None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        items = {"num_items_in_batch": kwargs.pop("num_items_in_batch", None)}
        outputs = self.model(past_key_values=past_key_values, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **items
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


class VisionTower(nn.Module):
    def __init__(self, config: LatentVisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.patch_embed = nn.Linear(12, width)
        self.blocks = nn.ModuleList(Mlp(width, 2 * width) for _ in range(config.num_hidden_layers))

    def forward(self, patches: Tensor) -> Tensor:
        hidden = self.patch_embed(patches)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class LatentForConditionalGeneration(LatentPreTrainedModel, GenerationMixin):
    def __init__(self, config: LatentConfig) -> None:
        super().__init__(config)
        for part in (config.text_config, config.vision_config):
            part._attn_implementation = config._attn_implementation
        self.vision_tower = VisionTower(config.vision_config)
        self.mm_projector = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size)
        self.language_model = LatentForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            patches = self.mm_projector(self.vision_tower(pixel_values))
            inputs_embeds = torch.cat([patches, inputs_embeds[:, patches.shape[1] :]], dim=1)
        return self.language_model(
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            **kwargs,
        )
