"""What a run shows of itself: answers before and after, and a short account at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from airtune.run.progress import duration


@torch.no_grad()
def answer(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, max_new_tokens: int
) -> str:
    """What the model says after `ids`, greedily, up to its own end token."""
    was_training = model.training
    model.eval()
    ids_1S = torch.tensor([ids])
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    out_1S = model.generate(
        input_ids=ids_1S,
        attention_mask=torch.ones_like(ids_1S),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,  # the Trainer switches it off in the config
        pad_token_id=pad_id,
    )
    model.train(was_training)
    return str(tokenizer.decode(out_1S[0, len(ids) :], skip_special_tokens=True)).strip()


def report(lines: Sequence[Mapping[str, float]], model: PeftModel, adapter: Path) -> str:
    """What a run did and where its result is, for people."""
    steps = [line for line in lines if "loss" in line]
    evals = [line for line in lines if "eval_loss" in line]
    facts = {"steps": f"{int(lines[-1]['step'])}"}
    if steps:
        # A line may stand for several steps (logging_steps); its tokens are theirs, its step_s is of one.
        speeds = [(line["tokens"], line["tokens"] / line["tokens_per_s"]) for line in steps]
        tokens, seconds = map(sum, zip(*speeds, strict=True))
        facts["training time"] = duration(seconds)
        facts["speed"] = f"{tokens / seconds:.0f} tokens/s"
        facts["loss"] = f"{steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}"
    if evals:
        facts["eval loss"] = f"{evals[0]['eval_loss']:.4f} -> {evals[-1]['eval_loss']:.4f}"
    facts["run folder"] = str(adapter.parent)
    facts["adapter"] = str(adapter)
    facts["load it"] = loading_line(model, adapter)
    return "\n" + "".join(f"{name:14}{value}\n" for name, value in facts.items())


def loading_line(model: PeftModel, adapter: Path) -> str:
    """A line of Python that loads the base and the adapter with PEFT."""
    base = model.get_base_model()
    own_class = base.__class__
    # Code that came with the checkpoint is found by an Auto class. A class of the library is named, because
    # an Auto class may pick another one, whose parameters have other names.
    known = own_class.__module__.startswith("transformers.")
    name, remote = (own_class.__name__, "") if known else ("AutoModelForCausalLM", ", trust_remote_code=True")
    return (
        f"import peft, transformers; model = peft.PeftModel.from_pretrained("
        f"transformers.{name}.from_pretrained({str(base.name_or_path)!r}{remote}), {str(adapter)!r})"
    )
