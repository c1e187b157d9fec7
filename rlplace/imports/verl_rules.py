"""The keys of verl's trainer config, and the rule for each."""

from __future__ import annotations

from rlplace.imports.rules import Already, Into, No, Rulebook, To, Words

_PLACE = "cluster.component_placement"
_MODEL = No("has no key yet")
_LEARN = No("how a language model learns is no part of a plan yet")
_NAMED = No("memory is counted once model has the keys of its config.json")
_ROLLOUT_DTYPE = Words("rollout.dtype", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})
_ENGINE = No("options of a generation engine have no keys yet")
_DATA = No("prompts, answers and their tokenizing have no keys yet")
_SCORES = No("how scores become rewards has no key yet")
_CRITIC = No("has no key in the critic block")
_REFERENCE = No("has no key in the reference block")
_ESTIMATOR = No("a variant of the algorithm that has no key yet")
_KL = No("a penalty against a reference has no key yet")
_TRAINING = No("an option of a training library; the actor trains with FSDP2")
_CHECKPOINT = No("checkpoints have no keys yet")
_EVALUATION = No("evaluation has no keys yet")
_TRACKING = No("a job with language models is planned, not run: nothing is written")
_MICRO = No("micro-batches are counted in sequences of one rank")
_PROFILER = No("no profiler here")
_HERE = Already("the models that a job has are those that are placed")
_A, _R, _F = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."

RULES = Rulebook(
    {
        "trainer.nnodes": Into("cluster.num_nodes"),
        "trainer.n_gpus_per_node": Into("cluster.accelerators_per_node"),
        "trainer.total_epochs": No("runner.total_iterations counts iterations, not passes over prompts"),
        "trainer.total_training_steps": To("runner.total_iterations"),
        "trainer.default_local_dir": _TRACKING,
        "trainer.logger": _TRACKING,
        "trainer.critic_warmup": To("critic.warmup_iterations"),
        "trainer.device": Already("the accelerators are those of the machines"),
        "trainer.balance_batch": Already("rows are spread evenly over the ranks"),
        "reward_model.enable": _HERE,
        "reward_model.enable_resource_pool": Into(f"{_PLACE}.reward"),
        "reward_model.nnodes": Into(f"{_PLACE}.reward"),
        "reward_model.n_gpus_per_node": Into(f"{_PLACE}.reward"),
        "critic.enable": _HERE,
        "algorithm.adv_estimator": Into("algorithm.name"),
        "algorithm.gamma": To("algorithm.gamma", 1.0),
        "algorithm.lam": To("algorithm.gae_lambda", 1.0),
        "algorithm.use_kl_in_reward": Into("algorithm.kl_in"),
        "data.train_batch_size": To("algorithm.prompts", 1024),
        "data.max_prompt_length": Into("algorithm.max_prompt_length"),
        "data.max_response_length": Into("algorithm.max_new_tokens"),
        "data.seed": To("runner.seed"),
        "critic.cliprange_value": To("algorithm.value_clip", 0.5),
        "actor_rollout_ref.hybrid_engine": Already("the actor and the engines share what the placement gives both"),
        f"{_A}ppo_mini_batch_size": Into("algorithm.train_batch"),
        f"{_A}ppo_micro_batch_size_per_gpu": To("actor.micro_batch"),
        "critic.ppo_micro_batch_size_per_gpu": To("critic.micro_batch"),
        f"{_F}log_prob_micro_batch_size_per_gpu": To("reference.micro_batch"),
        "reward_model.micro_batch_size_per_gpu": To("reward.micro_batch"),
        "actor_rollout_ref.model.path": _NAMED,
        "critic.model.path": _NAMED,
        "reward_model.model.path": _NAMED,
        "actor_rollout_ref.model.enable_gradient_checkpointing": To("actor.checkpointing", True),
        "critic.model.enable_gradient_checkpointing": To("critic.checkpointing", True),
        "actor_rollout_ref.model.lora_rank": To("actor.lora_rank"),
        f"{_A}ppo_epochs": To("algorithm.epochs"),
        f"{_A}clip_ratio": To("algorithm.clip_ratio_low"),
        f"{_A}clip_ratio_low": To("algorithm.clip_ratio_low"),
        f"{_A}clip_ratio_high": To("algorithm.clip_ratio_high"),
        f"{_A}clip_ratio_c": _ESTIMATOR,
        f"{_A}entropy_coeff": To("algorithm.entropy_coef"),
        f"{_A}grad_clip": To("actor.optimizer.max_grad_norm"),
        f"{_A}optim.lr": To("actor.optimizer.lr"),
        f"{_A}optim.weight_decay": To("actor.optimizer.weight_decay", 0.01),
        "critic.optim.lr": To("critic.optimizer.lr", 1e-5),
        "critic.ppo_max_token_len_per_gpu": _MICRO,
        f"{_A}fsdp_config.param_offload": Into("actor.enable_offload"),
        f"{_A}fsdp_config.optimizer_offload": Into("actor.enable_offload"),
        f"{_A}use_kl_loss": Into("algorithm.kl_in"),
        f"{_A}kl_loss_coef": Into("algorithm.kl_coef"),
        f"{_A}kl_loss_type": Into("algorithm.kl_estimator"),
        "algorithm.kl_ctrl.kl_coef": Into("algorithm.kl_coef"),
        "algorithm.kl_ctrl.target_kl": Into("algorithm.kl_target"),
        "algorithm.kl_ctrl.horizon": Into("algorithm.kl_horizon"),
        "algorithm.kl_penalty": Into("algorithm.kl_estimator"),
        f"{_R}temperature": To("rollout.temperature"),
        f"{_R}top_p": To("rollout.top_p"),
        f"{_R}enforce_eager": To("rollout.enforce_eager"),
        f"{_A}strategy": Already("the actor trains with FSDP2", "fsdp2", "the actor trains with FSDP2 only"),
        f"{_A}use_dynamic_bsz": _MICRO,
        f"{_R}name": Already("engines of every make hold the same here"),
        f"{_R}n": To("algorithm.samples_per_prompt", 1),
        f"{_R}max_num_batched_tokens": To("rollout.step_tokens", 8192),
        f"{_R}max_num_seqs": To("rollout.step_sequences", 1024),
        f"{_R}dtype": _ROLLOUT_DTYPE,
        f"{_R}tensor_model_parallel_size": Into(f"{_PLACE}.rollout"),
        f"{_R}gpu_memory_utilization": To("rollout.gpu_memory_utilization", 0.5),
        f"{_R}free_cache_engine": Into("rollout.enable_offload"),
        f"{_F}fsdp_config.param_offload": To("reference.enable_offload"),
        "critic.model.fsdp_config.param_offload": To("critic.enable_offload"),
        "critic.model.fsdp_config.optimizer_offload": To("critic.enable_offload"),
        "reward_model.model.fsdp_config.param_offload": To("reward.enable_offload"),
    },
    {
        f"{_A}ppo_micro": _MICRO,
        f"{_A}ppo_max_token": _MICRO,
        f"{_A}kl_": _KL,
        f"{_A}optim.": _LEARN,
        f"{_A}checkpoint": _CHECKPOINT,
        f"{_A}profiler": _PROFILER,
        f"{_A}fsdp_config.": _TRAINING,
        f"{_A}megatron.": _TRAINING,
        f"{_A}policy_loss.": _ESTIMATOR,
        f"{_A}loss_agg_mode": _ESTIMATOR,
        _A: _TRAINING,
        f"{_R}val_kwargs.": _EVALUATION,
        _R: _ENGINE,
        _F: _REFERENCE,
        "actor_rollout_ref.model.": _MODEL,
        "actor_rollout_ref.": _TRAINING,
        "algorithm.kl": _KL,
        "algorithm.": _ESTIMATOR,
        "critic.": _CRITIC,
        "reward_model.": _SCORES,
        "reward_manager.": _SCORES,
        "reward.": _SCORES,
        "custom_reward_function.": _SCORES,
        "data.": _DATA,
        "trainer.val": _EVALUATION,
        "trainer.test_freq": _EVALUATION,
        "trainer.save_freq": _CHECKPOINT,
        "trainer.resume": _CHECKPOINT,
        "trainer.max_": _CHECKPOINT,
        "trainer.del_": _CHECKPOINT,
        "trainer.": _TRACKING,
        "global_profiler.": _PROFILER,
        "ray_kwargs.": No("cluster.ray says how Ray is reached"),
        "transfer_queue.": No("samples travel through the channels of the plan"),
        "hydra.": No("a line for Hydra: import the composed config (--cfg job) to bring in what it includes"),
        "defaults": No("a line for Hydra: import the composed config (--cfg job) to bring in what it includes"),
    },
)
