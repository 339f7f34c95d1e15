"""What a run says of itself at its end: what it did, and where the result is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from peft import PeftModel

from airtune.run.progress import duration


def report(lines: Sequence[Mapping[str, float]], model: PeftModel, adapter: Path) -> str:
    """What a run did and where its result is, for people."""
    steps = [line for line in lines if "loss" in line]
    evals = [line for line in lines if line.get("eval_loss") is not None]  # null: it was not finite
    facts = {"steps": f"{int(lines[-1]['step'])}"}
    if steps:
        # A line may stand for several steps (logging_steps); its tokens are theirs, its step_s is of one.
        speeds = [(line["tokens"], line["tokens"] / line["tokens_per_s"]) for line in steps]
        tokens, seconds = map(sum, zip(*speeds, strict=True))
        facts["training time"] = duration(seconds)
        facts["speed"] = f"{tokens / seconds:.0f} tokens/s"
        facts["loss"] = _course([line["loss"] for line in steps])
    if evals:
        facts["eval loss"] = _course([line["eval_loss"] for line in evals])
    facts["run folder"] = str(adapter.parent)
    facts["adapter"] = str(adapter)
    facts["load it"] = loading_line(model, adapter)
    return "\n" + "".join(f"{name:14}{value}\n" for name, value in facts.items())


def _course(losses: Sequence[float]) -> str:
    """The first and the last, where there are two."""
    ends = losses if len(losses) == 1 else (losses[0], losses[-1])
    return " -> ".join(f"{loss:.4f}" for loss in ends)


def loading_line(model: PeftModel, adapter: Path) -> str:
    """A line of Python that loads the base and the adapter with PEFT."""
    base = model.get_base_model()
    own_class = base.__class__
    # Code that came with the checkpoint is found by an Auto class. A class of the library is named, because
    # an Auto class may pick another one, whose parameters have other names.
    known = own_class.__module__.startswith("transformers.")
    name, more = (own_class.__name__, "") if known else ("AutoModelForCausalLM", ", trust_remote_code=True")
    (config,) = model.peft_config.values()
    if config.revision is not None:
        more += f", revision={config.revision!r}"
    return (
        f"import peft, transformers; model = peft.PeftModel.from_pretrained("
        f"transformers.{name}.from_pretrained({str(base.name_or_path)!r}{more}), {str(adapter)!r})"
    )
