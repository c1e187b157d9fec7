"""The flags of OpenRLHF's PPO trainer, dotted and old spelling, and the rule for each."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.imports.flags import MANY, Flag
from rlplace.imports.rules import Already, Into, No, Rule, Rulebook, To

_PLACE = "cluster.component_placement"
_DATA = No("prompts, answers and their tokenizing have no keys yet")
_LENGTH = Into("algorithm.sequence_length")
_DTYPE = Into("actor.weights")
_MODEL = No("has no key yet")
_ENGINE = No("options of a generation engine have no keys yet")
_DEEPSPEED = No("an option of DeepSpeed; the actor trains with FSDP2")
_KL = No("a penalty against a reference has no key yet")
_SCORES = No("how scores become rewards has no key yet")
_CRITIC = No("has no key in the critic block")
_ESTIMATOR = No("a variant of the algorithm that has no key yet")
_CHECKPOINT = No("checkpoints have no keys yet")
_EVALUATION = No("evaluation has no keys yet")
_TRACKING = No("no sink of this kind; runner.sinks has console, jsonl and tensorboard")
_LEARN = No("how a language model learns is no part of a plan yet")
_LORA = No("adapters have no keys yet")
_ASYNC = No("stages follow one another here; a queue between sampling and learning has no key yet")
_ROUTES = Already("the way of the weights is worked out from the placement")
_EVERY = "every iteration is written"
_STEPS = No("runner.total_env_steps counts env steps, not passes over prompts")
_MICRO = No("micro-batches are counted in sequences, not in tokens")
_NAMED = No("memory is counted once model has the keys of its config.json")
_SWITCH, _ONE, _TWO = 0, 1, 2


def _trained(leaf: str, default: object = None) -> To:
    """The flag speaks for both models that learn."""
    return To((f"actor.{leaf}", f"critic.{leaf}"), default)


# (key, old spellings, words that follow, rule)
_TABLE: tuple[tuple[str, str, int, Rule], ...] = (
    # who has how many accelerators
    ("actor.num_nodes", "actor_num_nodes", _ONE, Into(f"{_PLACE}.actor")),
    ("actor.num_gpus_per_node", "actor_num_gpus_per_node", _ONE, Into(f"{_PLACE}.actor")),
    ("critic.num_nodes", "critic_num_nodes", _ONE, Into(f"{_PLACE}.critic")),
    ("critic.num_gpus_per_node", "critic_num_gpus_per_node", _ONE, Into(f"{_PLACE}.critic")),
    ("ref.num_nodes", "ref_num_nodes", _ONE, Into(f"{_PLACE}.reference")),
    ("ref.num_gpus_per_node", "ref_num_gpus_per_node", _ONE, Into(f"{_PLACE}.reference")),
    ("reward.num_nodes", "reward_num_nodes", _ONE, Into(f"{_PLACE}.reward")),
    ("reward.num_gpus_per_node", "reward_num_gpus_per_node", _ONE, Into(f"{_PLACE}.reward")),
    ("vllm.num_engines", "vllm_num_engines", _ONE, Into(f"{_PLACE}.rollout")),
    ("vllm.tensor_parallel_size", "vllm_tensor_parallel_size", _ONE, Into(f"{_PLACE}.rollout")),
    ("ds.tensor_parallel_size", "ds_tensor_parallel_size", _ONE, Into(f"{_PLACE}.actor")),
    ("train.colocate_all", "colocate_all_models", _SWITCH, Into(_PLACE)),
    ("train.colocate_actor_ref", "colocate_actor_ref", _SWITCH, Into(_PLACE)),
    ("train.colocate_critic_reward", "colocate_critic_reward", _SWITCH, Into(_PLACE)),
    # who leaves when
    ("vllm.enable_sleep", "vllm_enable_sleep", _SWITCH, To("rollout.enable_offload")),
    ("ds.enable_sleep", "deepspeed_enable_sleep", _SWITCH, _trained("enable_offload")),
    ("ref.offload", "ref_reward_offload", _SWITCH, To("reference.enable_offload")),
    ("reward.offload", "", _SWITCH, To("reward.enable_offload")),
    ("ds.adam_offload", "adam_offload", _SWITCH, _trained("optimizer_on_host")),
    ("actor_init_on_gpu", "", _SWITCH, Already("a component loads where its accelerators are")),
    # the engines
    ("vllm.gpu_memory_utilization", "vllm_gpu_memory_utilization", _ONE, To("rollout.gpu_memory_utilization", 0.95)),
    ("vllm.sync_backend", "vllm_sync_backend", _ONE, _ROUTES),
    ("vllm.sync_with_ray", "vllm_sync_with_ray", _SWITCH, _ROUTES),
    ("vllm.enable_prefix_caching", "enable_prefix_caching", _SWITCH, _ENGINE),
    ("vllm.enforce_eager", "enforce_eager", _SWITCH, _ENGINE),
    # learning
    ("actor.adam.lr", "actor_learning_rate", _ONE, _LEARN),
    ("actor.adam.betas", "adam_betas", _TWO, _LEARN),
    ("actor.adam.eps", "", _ONE, _LEARN),
    ("actor.adam.weight_decay", "l2", _ONE, _LEARN),
    ("actor.max_norm", "max_norm", _ONE, _LEARN),
    (
        "actor.lr_scheduler",
        "lr_scheduler",
        _ONE,
        _LEARN,
    ),
    ("actor.lr_warmup_ratio", "lr_warmup_ratio", _ONE, _LEARN),
    ("actor.min_lr_ratio", "", _ONE, _LEARN),
    ("actor.eps_clip", "eps_clip", _ONE, _LEARN),
    ("critic.value_clip", "value_clip", _ONE, _LEARN),
    ("algo.advantage.gamma", "gamma", _ONE, _LEARN),
    ("algo.advantage.lambd", "lambd", _ONE, _LEARN),
    ("actor.entropy_coef", "entropy_loss_coef", _ONE, _LEARN),
    ("train.max_epochs", "max_epochs", _ONE, _LEARN),
    ("train.batch_size", "train_batch_size", _ONE, To("algorithm.train_batch", 128)),
    ("rollout.batch_size", "rollout_batch_size", _ONE, To("algorithm.prompts", 1024)),
    ("rollout.n_samples_per_prompt", "n_samples_per_prompt", _ONE, To("algorithm.samples_per_prompt", 1)),
    ("train.seed", "seed", _ONE, _LEARN),
    ("ckpt.output_dir", "save_path", _ONE, _CHECKPOINT),
    (
        "algo.advantage.estimator",
        "advantage_estimator",
        _ONE,
        Already("a critic is placed for it", "gae", _ESTIMATOR.why),
    ),
    ("ds.param_dtype", "param_dtype", _ONE, _DTYPE),
    ("bf16", "", _SWITCH, _DTYPE),
    ("ds.zero_stage", "zero_stage", _ONE, _trained("zero_stage", 2)),
    # known, without a key here
    ("train.micro_batch_size", "micro_train_batch_size", _ONE, _trained("micro_batch")),
    ("rollout.micro_batch_size", "micro_rollout_batch_size", _ONE, To(("reference.micro_batch", "reward.micro_batch"))),
    ("train.dynamic_batch_enable", "use_dynamic_batch", _SWITCH, _MICRO),
    ("train.max_tokens_per_gpu", "train_max_tokens_per_gpu", _ONE, _MICRO),
    ("rollout.max_tokens_per_gpu", "rollout_max_tokens_per_gpu", _ONE, _MICRO),
    ("rollout.vllm_generate_batch_size", "vllm_generate_batch_size", _ONE, _ENGINE),
    ("rollout.tasks_per_gpu", "rollout_tasks_per_gpu", _ONE, _ENGINE),
    ("rollout.temperature", "temperature", _ONE, _ENGINE),
    ("rollout.top_p", "top_p", _ONE, _ENGINE),
    ("rollout.max_new_tokens", "generate_max_len", _ONE, _LENGTH),
    ("prompt_max_len", "", _ONE, _LENGTH),
    ("data.max_len", "max_len", _ONE, _LENGTH),
    ("data.max_samples", "max_samples", _ONE, _DATA),
    ("data.prompt_dataset", "prompt_data", _ONE, _DATA),
    ("data.prompt_probs", "prompt_data_probs", _ONE, _DATA),
    ("data.prompt_split", "prompt_split", _ONE, _DATA),
    ("data.input_key", "input_key", _ONE, _DATA),
    ("data.label_key", "label_key", _ONE, _DATA),
    ("data.input_template", "input_template", _ONE, _DATA),
    ("data.apply_chat_template", "apply_chat_template", _SWITCH, _DATA),
    ("data.disable_fast_tokenizer", "disable_fast_tokenizer", _SWITCH, _DATA),
    ("data.dataloader_num_workers", "", _ONE, _DATA),
    ("data.image_key", "", _ONE, _DATA),
    ("data.max_images_per_prompt", "", _ONE, _DATA),
    ("actor.model_name_or_path", "pretrain", _ONE, _NAMED),
    ("critic.model_name_or_path", "critic_pretrain", _ONE, _NAMED),
    ("reward.model_name_or_path", "reward_pretrain", _ONE, _NAMED),
    ("reward.remote_url", "remote_rm_url", _ONE, _SCORES),
    ("train.agent_func_path", "agent_func_path", _ONE, _SCORES),
    ("reward.normalize_enable", "normalize_reward", _SWITCH, _SCORES),
    ("reward.clip_range", "reward_clip_range", _TWO, _SCORES),
    ("reward.overlong_buffer_len", "overlong_buffer_len", _ONE, _SCORES),
    ("reward.overlong_penalty_factor", "overlong_penalty_factor", _ONE, _SCORES),
    ("reward.stop_properly_penalty_coef", "", _ONE, _SCORES),
    ("algo.kl.init_coef", "init_kl_coef", _ONE, _KL),
    ("algo.kl.target", "kl_target", _ONE, _KL),
    ("algo.kl.horizon", "kl_horizon", _ONE, _KL),
    ("algo.kl.estimator", "kl_estimator", _ONE, _KL),
    ("algo.kl.use_loss", "use_kl_loss", _SWITCH, _KL),
    ("algo.advantage.no_std_norm", "no_advantage_std_norm", _SWITCH, _ESTIMATOR),
    ("algo.advantage.is_correction_enable", "enable_vllm_is_correction", _SWITCH, _ESTIMATOR),
    ("algo.advantage.is_correction_threshold", "", _TWO, _ESTIMATOR),
    ("vllm_is_truncated_threshold", "", MANY, _ESTIMATOR),
    ("algo.advantage.is_correction_type", "", _ONE, _ESTIMATOR),
    ("algo.dynamic_filtering_enable", "dynamic_filtering", _SWITCH, _ESTIMATOR),
    ("algo.dynamic_filtering_range", "dynamic_filtering_reward_range", _TWO, _ESTIMATOR),
    ("actor.eps_clip_low_high", "eps_clip_low_high", _TWO, _LEARN),
    ("actor.dual_clip", "dual_clip", _ONE, _ESTIMATOR),
    ("actor.policy_loss_type", "policy_loss_type", _ONE, _ESTIMATOR),
    ("actor.aux_loss_coef", "aux_loss_coef", _ONE, _ESTIMATOR),
    ("ptx_coef", "", _ONE, _ESTIMATOR),
    ("critic.adam.lr", "critic_learning_rate", _ONE, _CRITIC),
    ("critic.adam.betas", "", _TWO, _CRITIC),
    ("critic.adam.eps", "", _ONE, _CRITIC),
    ("critic.adam.weight_decay", "", _ONE, _CRITIC),
    ("critic.max_norm", "", _ONE, _CRITIC),
    ("critic.lr_scheduler", "", _ONE, _CRITIC),
    ("critic.lr_warmup_ratio", "", _ONE, _CRITIC),
    ("critic.min_lr_ratio", "", _ONE, _CRITIC),
    ("critic.freezing_steps", "freezing_actor_steps", _ONE, _CRITIC),
    ("critic.save_value_network", "save_value_network", _SWITCH, _CRITIC),
    ("actor.gradient_checkpointing_enable", "gradient_checkpointing", _SWITCH, _trained("checkpointing", False)),
    ("actor.gradient_checkpointing_reentrant", "gradient_checkpointing_use_reentrant", _SWITCH, _MODEL),
    ("actor.freeze_visual_encoder", "", _SWITCH, _MODEL),
    ("actor.optim", "", _ONE, Already("the actor learns with Adam", "adam", "the actor learns with Adam only")),
    ("critic.optim", "", _ONE, _CRITIC),
    ("ds.attn_implementation", "attn_implementation", _ONE, _MODEL),
    ("flash_attn", "", _SWITCH, _MODEL),
    ("ds.packing_samples", "packing_samples", _SWITCH, _MODEL),
    ("ds.ring_attn_size", "ring_attn_size", _ONE, _MODEL),
    ("ds.ring_attn_head_stride", "ring_head_stride", _ONE, _MODEL),
    ("ds.use_liger_kernel", "use_liger_kernel", _SWITCH, _MODEL),
    ("ds.experts_implementation", "", _ONE, _MODEL),
    ("ds.value_head_prefix", "value_head_prefix", _ONE, _MODEL),
    ("ds.load_in_4bit", "load_in_4bit", _SWITCH, _MODEL),
    ("ds.lora.rank", "lora_rank", _ONE, _trained("lora_rank")),
    ("ds.lora.alpha", "lora_alpha", _ONE, _LORA),
    ("ds.lora.dropout", "lora_dropout", _ONE, _LORA),
    ("ds.lora.target_modules", "target_modules", MANY, _LORA),
    ("ds.zpg", "zpg", _ONE, _DEEPSPEED),
    ("ds.overlap_comm", "overlap_comm", _SWITCH, _DEEPSPEED),
    ("ds.grad_accum_dtype", "grad_accum_dtype", _ONE, _DEEPSPEED),
    ("ds.deepcompile", "deepcompile", _SWITCH, _DEEPSPEED),
    ("ds.use_universal_ckpt", "use_ds_universal_ckpt", _SWITCH, _DEEPSPEED),
    ("local_rank", "", _ONE, Already("ranks are set by the launcher")),
    ("train.async_enable", "async_train", _SWITCH, _ASYNC),
    ("train.async_queue_size", "async_queue_size", _ONE, _ASYNC),
    ("train.partial_rollout_enable", "partial_rollout", _SWITCH, _ASYNC),
    ("train.num_episodes", "num_episodes", _ONE, _STEPS),
    ("train.full_determinism_enable", "full_determinism", _SWITCH, Already("samples follow from runner.seed alone")),
    ("train.enable_ema", "enable_ema", _SWITCH, _MODEL),
    ("train.ema_beta", "ema_beta", _ONE, _MODEL),
    ("use_ms", "", _SWITCH, _MODEL),
    ("perf", "", _SWITCH, _TRACKING),
    ("ckpt.path", "ckpt_path", _ONE, _CHECKPOINT),
    ("ckpt.save_steps", "save_steps", _ONE, _CHECKPOINT),
    ("ckpt.save_hf", "save_hf_ckpt", _SWITCH, _CHECKPOINT),
    ("ckpt.disable_ds", "disable_ds_ckpt", _SWITCH, _CHECKPOINT),
    ("ckpt.max_num", "max_ckpt_num", _ONE, _CHECKPOINT),
    ("ckpt.max_mem", "max_ckpt_mem", _ONE, _CHECKPOINT),
    ("ckpt.load_enable", "load_checkpoint", _SWITCH, _CHECKPOINT),
    ("ckpt.best_metric_key", "", _ONE, _CHECKPOINT),
    ("eval.steps", "eval_steps", _ONE, _EVALUATION),
    ("eval.dataset", "eval_dataset", _ONE, _EVALUATION),
    ("eval.split", "eval_split", _ONE, _EVALUATION),
    ("eval.temperature", "eval_temperature", _ONE, _EVALUATION),
    ("eval.n_samples_per_prompt", "eval_n_samples_per_prompt", _ONE, _EVALUATION),
    ("logger.logging_steps", "logging_steps", _ONE, Already(_EVERY, 1, _EVERY)),
    ("logger.tensorboard_dir", "use_tensorboard", _ONE, Already("runner.sinks has tensorboard unless it is left out")),
    ("logger.wandb.key", "use_wandb", _ONE, _TRACKING),
    ("logger.wandb.org", "wandb_org", _ONE, _TRACKING),
    ("logger.wandb.group", "wandb_group", _ONE, _TRACKING),
    ("logger.wandb.project", "wandb_project", _ONE, _TRACKING),
    ("logger.wandb.run_name", "wandb_run_name", _ONE, _TRACKING),
)

FLAGS: Mapping[str, Flag] = {key: Flag(words, (old,) if old else ()) for key, old, words, _ in _TABLE}
RULES = Rulebook({key: rule for key, _, _, rule in _TABLE}, spellings=[old for _, old, _, _ in _TABLE if old])
