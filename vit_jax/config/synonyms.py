"""Fields that are meant by a name that is no field: words of other systems, and similar spellings."""

from collections.abc import Iterable

from vit_jax.text.nearest import closest

_WORDS = {  # our field: the words of other systems
    "data": "dataset dataset_name data_path data_set",
    "global_batch": "batch_size batch train_batch_size per_device_train_batch_size bs",
    'total="N epochs"': "epochs num_epochs max_epochs train_epochs num_train_epochs",
    'total="N steps"': "steps num_steps max_steps total_steps train_steps training_steps",
    "init_from": "pretrained pretrained_path checkpoint_path weights model_init load_from ckpt",
    "resume_from": "resume resume_from_checkpoint",
    "seed": "random_seed rng_seed",
    "model.name": "model model_name arch architecture backbone variant patch_size",
    "model.width": "hidden_size embed_dim hidden_dim dim",
    "model.depth": "layers num_layers num_hidden_layers",
    "model.num_heads": "heads num_attention_heads",
    "model.mlp_dim": "intermediate_size",
    "model.position_resize": "interpolate_pos_encoding interpolate_antialias interpolate_offset",
    "model.pool": "pool_type global_pool",
    "model.compute_dtype": "dtype precision mixed_precision amp fp16 bf16",
    "model.remat": "gradient_checkpointing grad_checkpointing",
    "model.dropout_fraction": "dropout drop_rate dropout_rate hidden_dropout_prob",
    "model.stochastic_depth_form": "drop_path_uniform drop_path_decay",
    "model.stochastic_depth_fraction": "drop_path drop_path_rate stochastic_depth stochdepth",
    "input.image_size": "img_size input_size resolution size res crop_size",
    "input.flip": "hflip horizontal_flip",
    "input.mixup_alpha": "mixup",
    "input.cutmix_alpha": "cutmix",
    "input.cutmix_fraction": "mixup_switch_prob cutmix_prob",
    "input.erasing_fraction": "random_erasing reprob re_prob",
    "input.color_jitter": "colour_jitter jitter",
    "input.repeats": "aug_repeats repeated_aug num_repeats",
    "input.augmentations": "cutout hue gaussian_blur grayscale",
    "input.crop_area_fraction": "crop_scale random_resized_crop rrc_scale",
    "input.test_interpolation": "interpolation resample val_interpolation",
    "input.train_interpolation": "train_resample",
    "input.test_crop_fraction": "crop_pct crop_ratio crop_percent",
    "input.sampling": "weighted_sampler class_balanced balanced_sampling oversample",
    "input.randaugment_layers": "randaugment randaug rand_augment aa auto_augment autoaugment trivial_augment",
    "input.num_workers": "workers num_data_workers dataloader_num_workers",
    "input.holdout_fraction": "val_fraction validation_split val_split test_size",
    "objective.label_smoothing_fraction": "label_smoothing smoothing label_smoothing_factor",
    "objective.class_weights": "class_weight pos_weight",
    "optimizer.frozen": "freeze freeze_layers frozen_layers freeze_backbone",
    "optimizer.trained": "linear_probe head_only train_head",
    "optimizer.lora_rank": "lora lora_r peft use_lora",
    "optimizer.lora_layers": "target_modules lora_target_modules lora_modules",
    "optimizer.name": "optimizer opt optim",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_global_norm": "clip_grad grad_clip grad_clip_norm max_grad_norm gradient_clip_val clip clip_norm",
    "optimizer.accumulation_steps": "accum_steps grad_accum_steps gradient_accumulation_steps accumulate_grad_batches",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.layer_decay": "layer_wise_lr_decay llrd",
    "schedule.learning_rate": "lr base_lr max_lr peak_lr",
    "schedule.end_learning_rate": "min_lr end_lr final_lr",
    "schedule.decay": "schedule scheduler sched lr_scheduler lr_scheduler_type lr_schedule decay_type",
    'schedule.warmup="N steps"': "warmup_steps warmup_epochs warmup_ratio",
    "polyak.factor": "ema ema_decay model_ema model_ema_decay",
    'evaluation.every="N epochs"': "eval_every eval_steps eval_interval eval_freq log_eval_steps",
    'checkpoint.every="N epochs"': "save_steps save_every checkpoint_steps checkpoint_every ckpt_steps save_interval",
    'logging.every="N steps"': "log_every log_steps log_interval logging_steps log_training_steps print_freq",
    "stop_early.patience": "early_stopping early_stopping_patience early_stop",
    "stop_early.min_delta": "early_stopping_threshold early_stopping_delta min_improvement",
    "evaluation.global_batch": "eval_batch_size val_batch_size test_batch_size per_device_eval_batch_size",
    "checkpoint.keep_latest": "save_total_limit max_to_keep keep_checkpoints checkpoint_hist keep_last",
    "checkpoint.best_metric": "metric_for_best_model eval_metric monitor",
    "checkpoint.best_mode": "greater_is_better mode",
    "model.attention": "flash_attention flash_attn use_flash_attention attn_implementation sdpa fused_attn",
    "sharding.parameters": "fsdp zero zero_stage deepspeed",
    "sharding.num_model_shards": "tensor_parallel tensor_parallel_size tp model_parallel",
    "logging.profile_start_step": "profile profiler",
    "logging.wandb_project": "wandb project wandb_name",
}
_VALUES = {
    "token": "cls class cls_token class_token",
    "gap": "avg average mean",
    "adam": "adamw",
    "sgd": "momentum nesterov",
    "softmax": "cross_entropy ce crossentropy",
    "bce": "binary_cross_entropy bce_loss",
    "bfloat16": "bf16 fp16 float16 half amp",
    "float32": "fp32 full",
    "staircase": "step multistep",
    "optax:lion": "lion",
    "optax:adafactor": "adafactor",
    "optax:rmsprop": "rmsprop",
    "optax.contrib:muon": "muon",
}
_ABSENT = {  # names that others use for features that are not included, and what to do instead
    "The area of CutMix has no limits. Use input.cutmix_alpha alone.": "cutmix_minmax",
}
_MEANT_VALUE = {word: value for value, words in _VALUES.items() for word in words.split()}
MEANT = {word: field for field, words in _WORDS.items() for word in words.split()}
"""Our field for each word of other systems, with a sample value where its form is special."""
_ADVICE = {word: advice for advice, words in _ABSENT.items() for word in words.split()}


def meant_value(value: object, known: Iterable[object]) -> str:
    """Return " Did you mean VALUE?" with the known value or reference that other systems call so; "" without one."""
    meant = _MEANT_VALUE.get(str(value).lower(), "")
    return f" Did you mean {meant!r}?" if meant in known or ":" in meant else ""


def absent(name: str) -> str | None:
    """Return what to do about a feature of other systems that is not included; None for other names."""
    return _ADVICE.get(_word(name))


def _word(name: str) -> str:
    return name.rpartition(".")[2].lower().replace("-", "_")


def fields_meant(name: str, known: Iterable[str]) -> list[str]:
    """Return the fields of `known`, with dots between sections, that may be meant by `name`, the likeliest first.

    A field may be followed by `=` and a form of its value.
    """
    fields = list(known)
    leaf = name.rpartition(".")[2]
    word = _word(name)
    if word in _ADVICE:
        return []
    meant = [MEANT[word]] if word in MEANT and MEANT[word].partition("=")[0] in fields else []
    same_leaf = [field for field in fields if field.rpartition(".")[2] == leaf]
    close = [] if meant else closest(name, fields, 3, cutoff=0.5)
    return list(dict.fromkeys(same_leaf or meant + close))
