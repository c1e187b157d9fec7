"""The keys of RLinf's YAML files, and the rule for each."""

from __future__ import annotations

from rlplace.imports.rules import Already, Into, No, Rulebook, To, Words

_MODEL = No("models of this kind have no keys yet")
_ENGINE = No("options of a generation engine have no keys yet")
_TRAINING = No("an option of a training library; the actor trains with FSDP2")
_DATA = No("prompts, answers and their tokenizing have no keys yet")
_ESTIMATOR = No("a variant of the algorithm that has no key yet")
_SIMULATOR = No("an option of that simulator; env.kwargs takes what the simulator's own constructor takes")
_EVALUATION = No("evaluation has no keys yet")
_CHECKPOINT = No("checkpoints have no keys yet")
_HYDRA = No("a line for Hydra: import the composed config (--cfg job) to bring in what it includes")
_NAME = Already("groups are called by their component")
_PRECISION = Words("actor.compute", {"bf16": "bf16", "bf16-mixed": "bf16", 32: "fp32", "fp32": "fp32"})
_SCHEDULE = Words("actor.optimizer.schedule", {"constant": "constant", "linear": "linear"})
_AGAIN = "episodes begin again by themselves"

RULES = Rulebook(
    {
        "cluster.num_nodes": To("cluster.num_nodes"),
        "cluster.num_gpus_per_node": Into("cluster.accelerators_per_node"),
        "cluster.node_groups": Into("cluster.node_groups"),
        "cluster.auto_scheduler": No("the placement is what is written, and does not change by itself"),
        "env.group_name": _NAME,
        "env.enable_offload": To("env.enable_offload", False),
        "env.train.total_num_envs": To("env.total_num_envs"),
        "env.train.num_envs": To("env.total_num_envs"),
        "env.train.max_episode_steps": To("env.max_episode_steps"),
        "env.train.max_steps_per_rollout_epoch": Into("algorithm.rollout_steps"),
        "env.train.init_params.id": To("env.id"),
        "env.train.auto_reset": Already(_AGAIN, True, _AGAIN),
        "rollout.group_name": _NAME,
        "rollout.enable_offload": To("rollout.enable_offload"),
        "rollout.pipeline_stage_num": To("rollout.pipeline_stage_num", 1),
        "rollout.backend": Words("rollout.engine", {"huggingface": "torch"}),
        "rollout.rollout_backend": Words("rollout.engine", {"huggingface": "torch"}),
        "rollout.gpu_memory_utilization": To("rollout.gpu_memory_utilization"),
        "rollout.tensor_parallel_size": Into("cluster.component_placement"),
        "actor.group_name": _NAME,
        "actor.enable_offload": To("actor.enable_offload"),
        "actor.offload_weight": Into("actor.enable_offload"),
        "actor.offload_optimizer": Into("actor.enable_offload"),
        "actor.offload_grad": Into("actor.enable_offload"),
        "actor.seed": To("runner.seed", 1234),
        "actor.global_batch_size": Into("algorithm.num_minibatches"),
        "actor.micro_batch_size": No("micro-batches have no key: a minibatch is computed at once"),
        "actor.training_backend": Already("the actor trains with FSDP2", "fsdp", "the actor trains with FSDP2 only"),
        "actor.model.precision": _PRECISION,
        "actor.optim.lr": To("actor.optimizer.lr"),
        "actor.optim.adam_beta1": To("actor.optimizer.beta1", 0.9),
        "actor.optim.adam_beta2": To("actor.optimizer.beta2", 0.999),
        "actor.optim.adam_eps": To("actor.optimizer.eps"),
        "actor.optim.weight_decay": To("actor.optimizer.weight_decay"),
        "actor.optim.clip_grad": To("actor.optimizer.max_grad_norm"),
        "actor.optim.value_lr": No("policy and value network share actor.optimizer.lr"),
        "actor.lr_sched.lr_decay_style": _SCHEDULE,
        "algorithm.update_epoch": To("algorithm.epochs", 1),
        "algorithm.normalize_advantages": To("algorithm.normalize_advantages"),
        "algorithm.adv_type": Words("algorithm.name", {"gae": "ppo", "embodied_gae": "ppo", "ppo": "ppo"}),
        "algorithm.loss_type": Already("policy and values are learned, as PPO does", "actor_critic", _ESTIMATOR.why),
        "algorithm.gamma": To("algorithm.gamma"),
        "algorithm.gae_lambda": To("algorithm.gae_lambda"),
        "algorithm.clip_ratio_high": To("algorithm.clip_ratio_high"),
        "algorithm.clip_ratio_low": To("algorithm.clip_ratio_low"),
        "algorithm.ratio_clip_eps": To("algorithm.clip_ratio_low"),
        "algorithm.value_clip": To("algorithm.value_clip"),
        "algorithm.entropy_bonus": To("algorithm.entropy_coef"),
        "algorithm.n_minibatches": To("algorithm.num_minibatches"),
        "algorithm.rollout_epoch": Into("algorithm.rollout_steps"),
        "algorithm.group_size": Already("every environment is its own", 1, _ESTIMATOR.why),
        "algorithm.shuffle_rollout": Already("minibatches are drawn anew in every pass"),
        "runner.max_epochs": Into("runner.total_iterations"),
        "runner.max_steps": No("runner.total_iterations ends a run"),
        "runner.logger.log_path": To("runner.output_dir"),
        "runner.logger.logger_backends": Into("runner.sinks"),
        "runner.task_type": Already("what a job is follows from its components"),
        "runner.seq_length": _DATA,
        "runner.max_prompt_length": _DATA,
        "critic.use_critic_model": Already("a critic is there where it is placed"),
        "reward.use_reward_model": Already("a reward model is there where it is placed"),
    },
    {
        "cluster.component_placement.": Into("cluster.component_placement"),
        "cluster.": No("no such key of the cluster here"),
        "defaults": _HYDRA,
        "hydra.": _HYDRA,
        "env.train.": _SIMULATOR,
        "env.eval.": _EVALUATION,
        "env.": _SIMULATOR,
        "rollout.": _ENGINE,
        "actor.model.": _MODEL,
        "actor.tokenizer.": _DATA,
        "actor.": _TRAINING,
        "critic.": No("the critic has no block of its own yet"),
        "reward.": No("how rewards are computed has no key yet"),
        "inference.": No("the actor itself computes log-probabilities"),
        "data.": _DATA,
        "algorithm.sampling_params.": _ENGINE,
        "algorithm.length_params.": _ENGINE,
        "algorithm.": _ESTIMATOR,
        "runner.logger.": No("no sink of this kind; runner.sinks has console, jsonl and tensorboard"),
        "runner.val_check_interval": _EVALUATION,
        "runner.only_eval": _EVALUATION,
        "runner.eval_policy_path": _EVALUATION,
        "runner.save_interval": _CHECKPOINT,
        "runner.resume_dir": _CHECKPOINT,
        "runner.ckpt_path": _CHECKPOINT,
        "runner.": No("no such key of the run here"),
    },
)

_LEARN = No("how a language model learns is no part of a plan yet")
_HOLDS = No("memory is counted once model has the keys of its config.json")

# Jobs without simulators: the same file layout, other keys of ours.
LLM_RULES = Rulebook(
    {key: rule for key, rule in RULES.rules.items() if key.startswith(("cluster.", "critic.", "reward."))}
    | {
        "rollout.group_name": _NAME,
        "actor.group_name": _NAME,
        "critic.group_name": _NAME,
        "reward.group_name": _NAME,
        "rollout.enable_offload": To("rollout.enable_offload"),
        "actor.enable_offload": To("actor.enable_offload"),
        "rollout.gpu_memory_utilization": To("rollout.gpu_memory_utilization"),
        "rollout.tensor_parallel_size": Into("cluster.component_placement.rollout"),
        "rollout.model.model_path": _HOLDS,
        "rollout.rollout_backend": Already("engines of every make hold the same here"),
        "actor.offload_weight": Into("actor.enable_offload"),
        "actor.offload_optimizer": Into("actor.enable_offload"),
        "actor.offload_grad": Into("actor.enable_offload"),
        "critic.offload_weight": Into("critic.enable_offload"),
        "critic.offload_optimizer": Into("critic.enable_offload"),
        "critic.offload_grad": Into("critic.enable_offload"),
        "actor.micro_batch_size": To("actor.micro_batch"),
        "actor.global_batch_size": To("algorithm.train_batch"),
        "actor.model.precision": Words("actor.compute", {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", 32: "fp32"}),
        "actor.model.recompute_granularity": Words("actor.checkpointing", {"full": True}),
        "data.rollout_batch_size": To("algorithm.prompts"),
        "algorithm.group_size": To("algorithm.samples_per_prompt"),
        "algorithm.n_minibatches": Into("algorithm.train_batch"),
        "runner.seq_length": To("algorithm.sequence_length"),
        "runner.task_type": Already("what a job is follows from its components"),
        "algorithm.adv_type": Into("algorithm.name"),
        "actor.optim.lr": To("actor.optimizer.lr"),
        "actor.optim.adam_beta1": To("actor.optimizer.beta1"),
        "actor.optim.adam_beta2": To("actor.optimizer.beta2"),
        "actor.optim.adam_eps": To("actor.optimizer.eps"),
        "actor.optim.weight_decay": To("actor.optimizer.weight_decay"),
        "actor.optim.clip_grad": To("actor.optimizer.max_grad_norm"),
        "actor.seed": To("runner.seed"),
        "algorithm.gamma": To("algorithm.gamma"),
        "algorithm.gae_lambda": To("algorithm.gae_lambda"),
        "algorithm.ratio_clip_eps": To("algorithm.clip_ratio_low"),
        "algorithm.clip_ratio_low": To("algorithm.clip_ratio_low"),
        "algorithm.clip_ratio_high": To("algorithm.clip_ratio_high"),
        "algorithm.value_clip": To("algorithm.value_clip"),
        "algorithm.entropy_bonus": To("algorithm.entropy_coef"),
    },
    RULES.groups
    | {
        "actor.optim.": _LEARN,
        "actor.lr_sched.": _LEARN,
        "critic.": No("has no key in the critic block"),
        "actor.model.": No("has no key yet"),
        "algorithm.": _LEARN,
        "runner.": No("has no key in a job with language models"),
    },
)
