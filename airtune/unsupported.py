"""Fields of transformers' `TrainingArguments` that streaming cannot honour, each with the reason.

They would do nothing, or something else than was asked for, without a word. So they are refused when they are
switched on: in a configuration by `trainer_keys`, and by the Trainer to those who build it themselves.
"""

ISOLATION = "rows would see one another; raise per_device_train_batch_size instead"
_RECOMPUTED = "streaming already recomputes each layer in backward; leave it out"
_DTYPE = "set model.dtype for the base; adapters and optimizer are fp32"
_SHARDING = "layers are streamed, not sharded; leave it out"
_KERNELS = "it replaces forwards that streaming wraps; leave it out"

REFUSED = {
    "activation_checkpointing": _RECOMPUTED,
    "activation_checkpointing_kwargs": _RECOMPUTED,
    "gradient_checkpointing": _RECOMPUTED,
    "gradient_checkpointing_kwargs": _RECOMPUTED,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "bf16_full_eval": _DTYPE,
    "fp16_full_eval": _DTYPE,
    "deepspeed": _SHARDING,
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "parallelism_config": _SHARDING,
    "torch_compile": _KERNELS,
    "torch_compile_backend": _KERNELS,
    "torch_compile_mode": _KERNELS,
    "use_liger_kernel": _KERNELS,
    "liger_kernel_config": _KERNELS,
    "packing": ISOLATION,
    "padding_free": ISOLATION,
    "use_cache": "a cache that reaches a recomputed layer makes its gradients wrong; leave it out",
    "auto_find_batch_size": "set stream.device_memory and stream.micro_batch_size, which bound memory",
    "label_smoothing_factor": "the loss is computed without ever holding all logits",
    "push_to_hub": "push the folder `adapter` when the run is over",
    "debug": "it looks into weights that are not there",
    "enable_jit_checkpoint": "it would end an interrupted run as if it were complete; set save_steps",
}
