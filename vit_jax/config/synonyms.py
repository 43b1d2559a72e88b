"""Fields that people mean by a name that is no field: words of other systems, similar spellings."""

from collections.abc import Iterable, Mapping

from vit_jax.text.nearest import closest

_WORDS = {
    "data": "dataset dataset_name data_path data_set",
    "global_batch": "batch_size batch train_batch_size per_device_train_batch_size bs",
    'total="N epochs"': "epochs num_epochs max_epochs train_epochs num_train_epochs total_epochs",
    'total="N steps"': "steps num_steps max_steps total_steps train_steps training_steps",
    "init_from": "pretrained pretrained_path checkpoint_path weights model_init load_from ckpt",
    "resume_from": "resume resume_from_checkpoint",
    "seed": "random_seed rng_seed",
    "model.name": "model model_name arch architecture backbone variant",
    'model.name="ViT-B/PATCH"': "patch_size patch",
    "model.width": "hidden_size embed_dim hidden_dim dim",
    "model.depth": "layers num_layers num_hidden_layers",
    "model.num_heads": "heads num_attention_heads",
    "model.mlp_dim": "intermediate_size",
    "model.position_resize": "interpolate_pos_encoding interpolate_antialias interpolate_offset",
    "model.position_embedding": "posemb pos_embed",
    "model.pool": "pool_type global_pool classifier",
    "model.compute_dtype": "dtype precision mixed_precision amp fp16 bf16",
    "model.remat": "gradient_checkpointing grad_checkpointing",
    "model.dropout_fraction": "dropout drop_rate dropout_rate hidden_dropout_prob",
    "model.stochastic_depth_form": "drop_path_uniform drop_path_decay",
    "model.stochastic_depth_fraction": "drop_path drop_path_rate stochastic_depth stochdepth",
    "input.image_size": "img_size input_size resolution size res crop_size",
    "input.channels": "in_chans in_channels num_channels input_channels",
    "input.channel_mean": "mean image_mean",
    "input.channel_std": "std image_std",
    "input.flip": "hflip horizontal_flip",
    "input.vertical_flip": "vflip flip_ud random_vertical_flip",
    "input.rotate90": "rot90 random_rotate90 rotate",
    "input.mixup_alpha": "mixup",
    "input.patch_dropout": "patch_drop_rate",
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
    "input.randaugment_layers": (
        "randaugment randaug rand_augment aa auto_augment autoaugment trivial_augment"
    ),
    "input.num_workers": "workers num_data_workers dataloader_num_workers",
    "input.holdout_fraction": "val_fraction validation_split val_split test_size",
    "objective.label_smoothing_fraction": "label_smoothing smoothing label_smoothing_factor",
    "objective.class_weights": "class_weight pos_weight",
    "optimizer.frozen": "freeze freeze_layers frozen_layers freeze_backbone",
    "optimizer.trained": (
        "linear_probe head_only train_head last_blocks unfreeze_last num_unfrozen trainable_layers"
    ),
    "optimizer.lora_rank": "lora lora_r peft use_lora",
    "optimizer.lora_layers": "target_modules lora_target_modules lora_modules",
    "optimizer.name": "optimizer opt optim optax_name",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_global_norm": (
        "clip_grad grad_clip grad_clip_norm grad_norm_clip max_grad_norm gradient_clip_val clip clip_norm"
    ),
    "optimizer.accumulation_steps": (
        "accum_steps grad_accum_steps gradient_accumulation_steps accumulate_grad_batches"
    ),
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.layer_decay": "layer_wise_lr_decay llrd",
    "schedule.learning_rate": "lr base_lr max_lr peak_lr",
    "schedule.end_learning_rate": "min_lr end_lr final_lr",
    "schedule.decay": (
        "schedule scheduler sched lr_scheduler lr_scheduler_type lr_schedule decay_type"
    ),
    'schedule.warmup="N steps"': "warmup_steps warmup_epochs warmup_ratio",
    "polyak.factor": "ema ema_decay model_ema model_ema_decay",
    'evaluation.every="N epochs"': "eval_every eval_steps eval_interval eval_freq log_eval_steps",
    'checkpoint.every="N epochs"': (
        "save_steps save_every checkpoint_steps checkpoint_every ckpt_steps save_interval"
    ),
    'logging.every="N steps"': (
        "log_every log_steps log_interval logging_steps log_training_steps print_freq progress_every"
    ),
    "stop_early.patience": "early_stopping early_stopping_patience early_stop",
    "stop_early.min_delta": "early_stopping_threshold early_stopping_delta min_improvement",
    "evaluation.global_batch": (
        "eval_batch_size val_batch_size test_batch_size per_device_eval_batch_size batch_eval"
    ),
    "checkpoint.keep_latest": (
        "save_total_limit max_to_keep keep_checkpoints checkpoint_hist keep_last"
    ),
    "checkpoint.best_metric": "metric_for_best_model eval_metric monitor",
    "checkpoint.best_mode": "greater_is_better mode",
    "model.attention": (
        "flash_attention flash_attn use_flash_attention attn_implementation sdpa fused_attn"
    ),
    "sharding.parameters": "fsdp zero zero_stage deepspeed",
    "sharding.num_model_shards": "tensor_parallel tensor_parallel_size tp model_parallel",
    "logging.profile_start_step": "profile profiler",
    "logging.wandb_project": "wandb project wandb_name",
    "logging.writers": "mlflow tracker trackers report_to",
}
"""Words of other systems by field."""

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
"""Words of other systems by value."""

_ABSENT = {
    "The area of CutMix has no limits. Use input.cutmix_alpha alone.": "cutmix_minmax",
}
"""Names that others have for features that are not included, by advice."""


def _index_words(words_by_meaning: Mapping[str, str]) -> dict[str, str]:
    """Return the meaning of each word."""
    meanings: dict[str, str] = {}
    for meaning, words in words_by_meaning.items():
        meanings |= dict.fromkeys(words.split(), meaning)
    return meanings


MEANT = _index_words(_WORDS)
"""Our field for each word of other systems, with a sample value where its form is special."""
_MEANT_VALUES = _index_words(_VALUES)
_ADVICE = _index_words(_ABSENT)


def suggest_value(value: object, known: Iterable[object]) -> str:
    """Return " Did you mean VALUE?" for a value as other systems call it.

    The meant value is one of `known`, or a reference. Return "" for other values.
    """
    meant = _MEANT_VALUES.get(str(value).lower(), "")
    if meant in known or ":" in meant:
        return f" Did you mean {meant!r}?"
    return ""


def find_advice(name: str) -> str | None:
    """Return advice for a feature of other systems that is not included; None for other names."""
    return _ADVICE.get(_normalize(name))


def _normalize(name: str) -> str:
    """Return the last part of a name in the spelling of the tables."""
    return name.rpartition(".")[2].lower().replace("-", "_")


def find_meant_fields(name: str, known: Iterable[str]) -> list[str]:
    """Return the fields of `known` that may be meant by a name, the likeliest first.

    Fields have dots between sections. A field may be followed by `=` and a form of its value.
    """
    fields = list(known)
    word = _normalize(name)
    if word in _ADVICE:
        return []
    leaf = name.rpartition(".")[2]
    same_leaf = [field for field in fields if field.rpartition(".")[2] == leaf]
    if same_leaf:
        return same_leaf
    meant = MEANT.get(word, "")
    if meant.partition("=")[0] in fields:
        return [meant]
    return closest(name, fields, 3, cutoff=0.5)
