"""The flags of OpenRLHF's PPO trainer, dotted and old spelling, and the rule for each."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.imports.flags import MANY, Flag
from rlplace.imports.rules import Already, Into, No, Rule, Rulebook, To, Words

_PLACE = "cluster.component_placement"
_DATA = No("a data set is read whole, as env.kwargs says")
_ENV = Into("env.kwargs")
_LENGTH = Into("algorithm.sequence_length")
_DTYPE = Into("actor.weights")
_MODEL = No("has no key yet")
_ENGINE = No("the engine decides by itself")
_DEEPSPEED = No("an option of DeepSpeed; the actor trains with FSDP2")
_AGENT = No("env.task takes a class of your own for it: rlplace/envs/text/contract.py says how")
_CRITIC = No("has no key in the critic block")
_ESTIMATOR = No("a variant of the algorithm that has no key yet")
_CHECKPOINT = No("checkpoints have no keys yet")
_EVALUATION = No("held-out prompts are each answered once, greedily")
_TRACKING = No("no sink of this kind; runner.sinks has console, jsonl and tensorboard")
_WARMUP = No("actor.optimizer.warmup_steps counts optimizer steps, not a share of them")
_ASYNC = Into("algorithm.max_staleness")
_LORA = No("has no key beside lora_rank, lora_alpha and lora_targets")
_SCHEDULES: Mapping[object, object] = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
_ROUTES = Already("the way of the weights is worked out from the placement")
_EVERY = "every iteration is written"
_STEPS = No("runner.total_iterations counts iterations, and how many prompts there are is not said")
_BUDGET = Into("actor.token_budget")
_NAMED = No("no model of a known name: write model: {path: <its folder>}, or keys of its config.json")
_RATIOS: Mapping[object, object] = {"ppo": "token", "gspo": "sequence"}
_TIS = Into("algorithm.tis_cap")
_SWITCH, _ONE, _TWO = 0, 1, 2


def _trained(leaf: str, default: object = None) -> To:
    """The flag speaks for both models that learn."""
    return To((f"actor.{leaf}", f"critic.{leaf}"), default)


def _scheduled(default: str) -> Words:
    return Words(("actor.optimizer.schedule", "critic.optimizer.schedule"), _SCHEDULES, default)


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
    ("ds.adam_offload", "adam_offload", _SWITCH, _trained("optimizer.on_host")),
    ("actor_init_on_gpu", "", _SWITCH, Already("a component loads where its accelerators are")),
    # the engines
    ("vllm.gpu_memory_utilization", "vllm_gpu_memory_utilization", _ONE, To("rollout.gpu_memory_utilization", 0.95)),
    ("vllm.sync_backend", "vllm_sync_backend", _ONE, _ROUTES),
    ("vllm.sync_with_ray", "vllm_sync_with_ray", _SWITCH, _ROUTES),
    ("vllm.enable_prefix_caching", "enable_prefix_caching", _SWITCH, _ENGINE),
    ("vllm.enforce_eager", "enforce_eager", _SWITCH, To("rollout.enforce_eager")),
    # learning
    ("actor.adam.lr", "actor_learning_rate", _ONE, To("actor.optimizer.lr", 1e-6)),
    ("actor.adam.betas", "adam_betas", _TWO, Into("actor.optimizer")),
    ("actor.adam.eps", "", _ONE, To("actor.optimizer.eps")),
    ("actor.adam.weight_decay", "l2", _ONE, To("actor.optimizer.weight_decay")),
    ("actor.max_norm", "max_norm", _ONE, To("actor.optimizer.max_grad_norm")),
    ("actor.lr_scheduler", "lr_scheduler", _ONE, _scheduled("cosine_with_min_lr")),
    ("actor.lr_warmup_ratio", "lr_warmup_ratio", _ONE, _WARMUP),
    ("actor.min_lr_ratio", "", _ONE, No("rates that fall, fall to 0")),
    ("actor.eps_clip", "eps_clip", _ONE, To("algorithm.clip_ratio_low", 0.2)),
    ("critic.value_clip", "value_clip", _ONE, To("algorithm.value_clip", 0.5)),
    ("algo.advantage.gamma", "gamma", _ONE, To("algorithm.gamma", 1.0)),
    ("algo.advantage.lambd", "lambd", _ONE, To("algorithm.gae_lambda", 1.0)),
    ("actor.entropy_coef", "entropy_loss_coef", _ONE, To("algorithm.entropy_coef")),
    ("train.max_epochs", "max_epochs", _ONE, To("algorithm.epochs", 1)),
    ("train.batch_size", "train_batch_size", _ONE, To("algorithm.train_batch", 128)),
    ("rollout.batch_size", "rollout_batch_size", _ONE, To("algorithm.prompts", 1024)),
    ("rollout.n_samples_per_prompt", "n_samples_per_prompt", _ONE, To("algorithm.samples_per_prompt", 1)),
    ("train.seed", "seed", _ONE, To("runner.seed", 42)),
    ("ckpt.output_dir", "save_path", _ONE, To("runner.output_dir")),
    ("algo.advantage.estimator", "advantage_estimator", _ONE, _ESTIMATOR),
    ("ds.param_dtype", "param_dtype", _ONE, _DTYPE),
    ("bf16", "", _SWITCH, _DTYPE),
    ("ds.zero_stage", "zero_stage", _ONE, _trained("zero_stage", 2)),
    # passes, prompts, models, scores
    ("train.micro_batch_size", "micro_train_batch_size", _ONE, _trained("micro_batch")),
    ("rollout.micro_batch_size", "micro_rollout_batch_size", _ONE, To(("reference.micro_batch", "reward.micro_batch"))),
    ("train.dynamic_batch_enable", "use_dynamic_batch", _SWITCH, _BUDGET),
    ("train.max_tokens_per_gpu", "train_max_tokens_per_gpu", _ONE, _BUDGET),
    ("rollout.max_tokens_per_gpu", "rollout_max_tokens_per_gpu", _ONE, Into("reference.token_budget")),
    ("rollout.vllm_generate_batch_size", "vllm_generate_batch_size", _ONE, _ENGINE),
    ("rollout.tasks_per_gpu", "rollout_tasks_per_gpu", _ONE, _ENGINE),
    ("rollout.temperature", "temperature", _ONE, To("rollout.temperature", 1.0)),
    ("rollout.top_p", "top_p", _ONE, To("rollout.top_p", 1.0)),
    ("rollout.max_new_tokens", "generate_max_len", _ONE, _LENGTH),
    ("prompt_max_len", "", _ONE, _LENGTH),
    ("data.max_len", "max_len", _ONE, _LENGTH),
    ("data.max_samples", "max_samples", _ONE, Into("runner.total_iterations")),
    ("data.prompt_dataset", "prompt_data", _ONE, _ENV),
    ("data.prompt_probs", "prompt_data_probs", _ONE, _DATA),
    ("data.prompt_split", "prompt_split", _ONE, _DATA),
    ("data.input_key", "input_key", _ONE, _ENV),
    ("data.label_key", "label_key", _ONE, _ENV),
    ("data.input_template", "input_template", _ONE, _DATA),
    ("data.apply_chat_template", "apply_chat_template", _SWITCH, Into("env.chat")),
    ("data.disable_fast_tokenizer", "disable_fast_tokenizer", _SWITCH, _DATA),
    ("data.dataloader_num_workers", "", _ONE, _DATA),
    ("data.image_key", "", _ONE, _DATA),
    ("data.max_images_per_prompt", "", _ONE, _DATA),
    ("actor.model_name_or_path", "pretrain", _ONE, _NAMED),
    ("critic.model_name_or_path", "critic_pretrain", _ONE, _NAMED),
    ("reward.model_name_or_path", "reward_pretrain", _ONE, _NAMED),
    ("reward.remote_url", "remote_rm_url", _ONE, Into("reward.url")),
    ("train.agent_func_path", "agent_func_path", _ONE, _AGENT),
    ("reward.normalize_enable", "normalize_reward", _SWITCH, To("algorithm.normalize_rewards")),
    ("reward.clip_range", "reward_clip_range", _TWO, Into("algorithm.reward_clip")),
    ("reward.overlong_buffer_len", "overlong_buffer_len", _ONE, Into("env.rewards")),
    ("reward.overlong_penalty_factor", "overlong_penalty_factor", _ONE, Into("env.rewards")),
    ("reward.stop_properly_penalty_coef", "", _ONE, No("has no key; a reward function of your own may do it")),
    ("algo.kl.init_coef", "init_kl_coef", _ONE, To("algorithm.kl_coef", 0.01)),
    ("algo.kl.target", "kl_target", _ONE, To("algorithm.kl_target")),
    ("algo.kl.horizon", "kl_horizon", _ONE, To("algorithm.kl_horizon", 10000)),
    ("algo.kl.estimator", "kl_estimator", _ONE, To("algorithm.kl_estimator", "k1")),
    ("algo.kl.use_loss", "use_kl_loss", _SWITCH, Into("algorithm.kl_in")),
    ("algo.advantage.no_std_norm", "no_advantage_std_norm", _SWITCH, _ESTIMATOR),
    ("algo.advantage.is_correction_enable", "enable_vllm_is_correction", _SWITCH, _TIS),
    ("algo.advantage.is_correction_threshold", "", _TWO, _TIS),
    ("vllm_is_truncated_threshold", "", MANY, _TIS),
    ("algo.advantage.is_correction_type", "", _ONE, _ESTIMATOR),
    ("algo.dynamic_filtering_enable", "dynamic_filtering", _SWITCH, To("algorithm.dynamic_sampling")),
    ("algo.dynamic_filtering_range", "dynamic_filtering_reward_range", _TWO, _ESTIMATOR),
    ("actor.eps_clip_low_high", "eps_clip_low_high", _TWO, Into("algorithm.clip_ratio_low")),
    ("actor.dual_clip", "dual_clip", _ONE, _ESTIMATOR),
    (
        "actor.policy_loss_type",
        "policy_loss_type",
        _ONE,
        Words("algorithm.ratio", _RATIOS),
    ),
    ("actor.aux_loss_coef", "aux_loss_coef", _ONE, _ESTIMATOR),
    ("ptx_coef", "", _ONE, _ESTIMATOR),
    ("critic.adam.lr", "critic_learning_rate", _ONE, To("critic.optimizer.lr", 9e-6)),
    ("critic.adam.betas", "", _TWO, Into("critic.optimizer")),
    ("critic.adam.eps", "", _ONE, To("critic.optimizer.eps")),
    ("critic.adam.weight_decay", "", _ONE, To("critic.optimizer.weight_decay")),
    ("critic.max_norm", "", _ONE, To("critic.optimizer.max_grad_norm")),
    ("critic.lr_scheduler", "", _ONE, Words("critic.optimizer.schedule", _SCHEDULES)),
    ("critic.lr_warmup_ratio", "", _ONE, _WARMUP),
    ("critic.min_lr_ratio", "", _ONE, _CRITIC),
    ("critic.freezing_steps", "freezing_actor_steps", _ONE, To("critic.warmup_iterations")),
    ("critic.save_value_network", "save_value_network", _SWITCH, _CRITIC),
    ("actor.gradient_checkpointing_enable", "gradient_checkpointing", _SWITCH, _trained("checkpointing", False)),
    ("actor.gradient_checkpointing_reentrant", "gradient_checkpointing_use_reentrant", _SWITCH, _MODEL),
    ("actor.freeze_visual_encoder", "", _SWITCH, _MODEL),
    ("actor.optim", "", _ONE, Already("the actor learns with Adam", "adam", "the actor learns with Adam only")),
    ("critic.optim", "", _ONE, _CRITIC),
    ("ds.attn_implementation", "attn_implementation", _ONE, _MODEL),
    ("flash_attn", "", _SWITCH, _MODEL),
    ("ds.packing_samples", "packing_samples", _SWITCH, Already("samples are always packed without padding")),
    ("ds.ring_attn_size", "ring_attn_size", _ONE, _MODEL),
    ("ds.ring_attn_head_stride", "ring_head_stride", _ONE, _MODEL),
    ("ds.use_liger_kernel", "use_liger_kernel", _SWITCH, _MODEL),
    ("ds.experts_implementation", "", _ONE, _MODEL),
    ("ds.value_head_prefix", "value_head_prefix", _ONE, To("reward.head")),
    ("ds.load_in_4bit", "load_in_4bit", _SWITCH, _MODEL),
    ("ds.lora.rank", "lora_rank", _ONE, _trained("lora_rank")),
    ("ds.lora.alpha", "lora_alpha", _ONE, _trained("lora_alpha")),
    ("ds.lora.dropout", "lora_dropout", _ONE, _LORA),
    ("ds.lora.target_modules", "target_modules", MANY, _trained("lora_targets")),
    ("ds.zpg", "zpg", _ONE, _DEEPSPEED),
    ("ds.overlap_comm", "overlap_comm", _SWITCH, _DEEPSPEED),
    ("ds.grad_accum_dtype", "grad_accum_dtype", _ONE, _DEEPSPEED),
    ("ds.deepcompile", "deepcompile", _SWITCH, _DEEPSPEED),
    ("ds.use_universal_ckpt", "use_ds_universal_ckpt", _SWITCH, _DEEPSPEED),
    ("local_rank", "", _ONE, Already("ranks are set by the launcher")),
    ("train.async_enable", "async_train", _SWITCH, _ASYNC),
    ("train.async_queue_size", "async_queue_size", _ONE, _ASYNC),
    (
        "train.partial_rollout_enable",
        "partial_rollout",
        _SWITCH,
        Already("with max_staleness, answers go on under new weights"),
    ),
    ("train.num_episodes", "num_episodes", _ONE, _STEPS),
    ("train.full_determinism_enable", "full_determinism", _SWITCH, Already("samples follow from runner.seed alone")),
    ("train.enable_ema", "enable_ema", _SWITCH, Into("actor.ema_decay")),
    ("train.ema_beta", "ema_beta", _ONE, Into("actor.ema_decay")),
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
    ("eval.steps", "eval_steps", _ONE, To("runner.eval_every")),
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
