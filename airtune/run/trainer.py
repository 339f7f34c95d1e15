"""transformers' Trainer for a model whose weights visit the accelerator and leave again.

The loop is the Trainer's own: order of rows, schedule, clipping, callbacks, resume. This subclass changes
what is wrong for a streamed adapter run, and nothing else:

    placement    the model says `cpu` and stays there; nobody moves it, wraps it or casts it
    loss         L = sum over the step of -log p(y) / supervised tokens of the step. With batches k of n_k
                 tokens and N = sum n_k that is sum_k (n_k / N) mean_k: each batch's own mean times its share.
                 A model need not know about accumulation for this, and its auxiliary losses are averaged
    evaluation   total NLL / total tokens of the whole set, not a mean of batch means; logits are never made
    faults       no supervised token, or a loss or gradient that is not finite: stop before the optimizer
    files        adapter, optimizer and state only; written whole, renamed when complete

It gives up several processes, autocast and label smoothing (which needs every logit of every token at once).

Shape legend: B rows, S positions.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput, rotate_checkpoints

from airtune.model.adapter_io import atomic_folder, load_adapter, save_adapter, write_adapter
from airtune.model.scoring import score_batch
from airtune.run.arguments import refuse_unsupported
from airtune.run.data.batches import Batch, RowsByLength, TokenRows, name_rows, supervised_count, token_count
from airtune.run.evaluation import RowScore, row_scores, totals
from airtune.run.tracking import StepMeter

logger = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """The run cannot go on; its text is complete. The adapter is as it was after the last whole step."""


class NothingLeft(TrainingError):
    """The checkpoint to go on from is at the run's last step."""


class StreamedTrainer(Trainer):
    """Trains the adapter of a streamed (or resident) causal language model.

    Args:
        model: a PeftModel on the CPU, or whose layers visit an accelerator by themselves.
        args: `use_cpu=True` is required. `per_device_train_batch_size` is the rows of one optimizer step.
        train_dataset: rows of {"input_ids", "labels"}; `data_collator` makes {"input_ids", "labels",
            "attention_mask"}, each int64 [B, S].
        eval_dataset: the same, for `eval_loss`.
        callbacks: further transformers callbacks.
        counters: cumulative counters of the stream; their growth within each step is logged with it.

    Raises:
        ValueError: an argument that cannot be honoured beside streaming.
        TrainingError: from `train()`, before the optimizer step, when the step must not be taken.
    """

    # `compute_loss` divides by the tokens of the whole step: the Trainer must not divide again.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PeftModel,
        args: TrainingArguments,
        *,
        train_dataset: TokenRows,
        data_collator: Callable[[Sequence[Mapping[str, Sequence[int]]]], Batch],
        eval_dataset: TokenRows | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        counters: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        refuse_unsupported(args)
        if args.gradient_accumulation_steps > 1:
            logger.warning(_ACCUMULATION, args.gradient_accumulation_steps, args.gradient_accumulation_steps)
        self.meter = StepMeter(counters)
        self.run_dir = Path(args.output_dir or "")
        self._peft_model = model
        self._train_rows = train_dataset
        self._step_batches: list[Batch] = []
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=[self.meter, *callbacks],
        )
        # Both write to the terminal in the Trainer's own way, over the progress that is shown inside a step.
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)

    # Placement: the model is where it has to be.

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: `.to()` would reach for weights that are not there."""

    def _build_accelerator_args(self, **kwargs: object) -> dict[str, object]:
        return super()._build_accelerator_args(**kwargs) | {"device_placement": False}

    def floating_point_ops(self, inputs: Batch) -> int:
        """0: counted from parameters, and frozen ones are placeholders without a size."""
        return 0

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """A share of warm-up is rounded up, and begins with the rate 0: a single step would learn nothing."""
        if num_training_steps == 1 and self.args.warmup_steps < 1:
            self.args.warmup_steps = 0
        return super().create_scheduler(num_training_steps, optimizer)

    # One step.

    def _get_train_sampler(self, train_dataset: Dataset[object] | None = None) -> Sampler[int] | None:
        if self.args.train_sampling_strategy == "group_by_length":
            step_rows = self.args.train_batch_size * self.args.gradient_accumulation_steps
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            return RowsByLength(self._train_rows, step_rows, seed)
        sampler: Sampler[int] | None = super()._get_train_sampler(train_dataset)
        return sampler

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], int | None]:
        """The batches of one optimizer step and their supervised tokens; an error if a batch has none."""
        self.meter.begin()
        batches: list[Batch] = super().get_batch_samples(epoch_iterator, num_batches, device)[0]
        self._step_batches = batches
        if not batches:
            raise TrainingError(
                f"step {self._step}: there is no batch: with dataloader_drop_last, {len(self._train_rows)} "
                f"rows do not fill one of per_device_train_batch_size={self.args.train_batch_size}"
            )
        for batch in batches:
            if supervised_count(batch) == 0:
                raise TrainingError(
                    f"step {self._step}: {self._rows([batch])} have no supervised token, so nothing to "
                    "learn. Look at learn_on and max_length, or take the rows out"
                )
        supervised = sum(map(supervised_count, batches))
        self.meter.count(tokens=sum(map(token_count, batches)), supervised_tokens=supervised)
        return batches, supervised

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, object]:
        """The batch's mean loss; in training, times its share of the step's `num_items_in_batch` tokens."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        if num_items_in_batch is not None:
            if not math.isfinite(loss.item()):
                raise TrainingError(
                    f"step {self._step}: the loss is {loss.item()} for {self._rows([inputs])}. {_ADVICE}"
                )
            loss = loss * (supervised_count(inputs) / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float:
        # The Trainer asks for it after clipping and before the optimizer: the last moment to stop.
        norm: Tensor | float = super()._get_grad_norm(model, grad_norm)
        if not math.isfinite(float(norm)):
            raise TrainingError(
                f"step {self._step}: the loss is finite but the gradient's norm is {float(norm)} for "
                f"{self._rows(self._step_batches)}. {_ADVICE}"
            )
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds tokens, seconds and the stream's counters to the line of a step, then logs it everywhere."""
        logs.pop("total_flos", None)
        if "loss" in logs:
            logs |= self.meter.take()
        super().log(logs, start_time)

    # Evaluation.

    def evaluation_loop(
        self,
        dataloader: DataLoader[Batch],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Mean NLL over all supervised tokens of `dataloader`, and their number."""
        self._peft_model.eval()
        self.callback_handler.eval_dataloader = dataloader
        scores: list[RowScore] = []
        # A data loader draws a seed for its workers: without the fork, evaluating would change later dropout.
        with torch.random.fork_rng(devices=[]):
            for inputs in dataloader:
                if supervised_count(inputs):
                    scores += row_scores(score_batch(self._peft_model, inputs), inputs["labels"])
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        found = totals(scores)
        if not scores:
            raise TrainingError("the evaluation rows have no supervised token")
        if not math.isfinite(found["loss"]):
            logger.error(
                "The evaluation loss is %s; training goes on, its own losses are finite", found["loss"]
            )
        metrics = {f"{metric_key_prefix}_{name}": found[name] for name in ("loss", "tokens")}
        return EvalLoopOutput(np.empty(0), None, metrics, self.num_examples(dataloader))

    # Files.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The verified adapter, in `output_dir` or else in the run's folder `adapter`."""
        folder = Path(output_dir) if output_dir else self.run_dir / "adapter"
        with _writing(folder):
            save_adapter(self._peft_model, folder, trained=self.state.global_step > 0)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        step = self.state.global_step
        target = self.run_dir / f"checkpoint-{step}"
        self.store_flos()
        self._keep_best(target)
        with _writing(target), atomic_folder(target) as folder:
            # A warm-up starts at learning rate 0: after one step the adapter may rightly be what it was.
            write_adapter(self._peft_model, folder, trained=step > 1)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(folder))
                self._save_rng_state(str(folder))
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        logger.info("Saved %s", target)
        rotate_checkpoints(
            str(self.run_dir), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=False
        )

    def _keep_best(self, target: Path) -> None:
        if self.state.best_global_step:
            best = target.with_name(f"checkpoint-{self.state.best_global_step}")
            if best == target or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_adapter(self._peft_model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        logger.info("The adapter is that of the best checkpoint, %s", self.state.best_model_checkpoint)
        load_adapter(self._peft_model, Path(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The optimizer's moments and the schedule's position; rates and decay are those asked for now.

        By itself the Trainer keeps the old peak, and takes one step at the rate of the old schedule.
        """
        names = ("initial_lr", "weight_decay", "betas", "eps")
        asked = [{name: group[name] for name in names if name in group} for group in self._groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        schedule = self.lr_scheduler
        if checkpoint is None or not isinstance(schedule, LambdaLR):  # other schedules are what has happened
            return
        schedule.base_lrs = [options["initial_lr"] for options in asked]
        for group, options, share in zip(self._groups, asked, schedule.lr_lambdas, strict=True):
            group |= options | {"lr": options["initial_lr"] * share(schedule.last_epoch)}
        schedule._last_lr = [group["lr"] for group in self._groups]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        assert self.optimizer is not None
        return self.optimizer.param_groups

    def _init_training_state(self, max_steps: int, *args: object) -> tuple[int, int]:
        position: tuple[int, int] = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)  # not how often the checkpoint's run logged and saved
        # Without this a run that resumes at its end takes one step too many.
        if self.state.global_step >= max_steps:
            raise NothingLeft(
                f"nothing left to train: the checkpoint is at step {self.state.global_step} of {max_steps}; "
                "raise max_steps or num_train_epochs to go on"
            )
        return position

    # What an error can name.

    @property
    def _step(self) -> int:
        return int(self.state.global_step) + 1

    def _rows(self, batches: Sequence[Batch]) -> str:
        return name_rows(batches, self._train_rows)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What a full or missing disk makes of safetensors, torch.save and Python, as one TrainingError."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        raise TrainingError(
            f"{path} cannot be saved: {error}. Make room, and go on from the last checkpoint (resume=true)"
        ) from error


_ADVICE = (
    "Stopped before the optimizer: the adapter is as after the last step. Lower the learning rate, look at "
    "these rows, or load the base in another dtype (fp16 overflows where bf16 does not)"
)


_ACCUMULATION = (
    "gradient_accumulation_steps=%d streams the whole model %d times a step. For the same step at less cost "
    "multiply per_device_train_batch_size; stream.micro_batch_size bounds its memory"
)
