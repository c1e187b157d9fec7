"""Names and words of other libraries, with the names of rlplace that have exactly the same meaning.

A name is here only if its value stays the same. The importers convert names that need another value, or two keys.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlplace.config.yaml_text import show
from rlplace.errors import did_you_mean

# Key of rlplace -> names in other libraries. A name with a leading dot is looked up below the component's block.
_KEYS = {
    "cluster.accelerators_per_node": "nproc_per_node n_gpus_per_node num_gpus_per_node gpus_per_node accelerators",
    "cluster.accelerator.memory": "gpu_memory gpu_mem vram gpu_memory_gb device_memory memory_per_gpu",
    "cluster.num_nodes": "num_machines machines nnodes n_nodes N",
    "runner.total_iterations": "total_train_steps total_training_steps num_iterations num_rollout iterations "
    "max_iterations num_updates "
    "training_iterations",
    "algorithm.tis_cap": "tis_imp_ratio_cap",
    "actor.router_loss_coef": "aux_loss_coef router_aux_loss_coef",
    "actor.router_replay": "enable_rollout_routing_replay use_rollout_routing_replay enable_routing_replay",
    "runner.output_dir": "outdir default_local_dir save_path log_dir ckpt_path ckpt_dir checkpoint_dir",
    "cluster.component_placement": "placement placements gpu_placement resource_placement",
    "checkpoint.every": "save_freq save_every save_interval save_steps checkpoint_every checkpoint_freq",
    "checkpoint.keep_last": "keep save_total_limit max_ckpt_to_keep max_ckpt_num",
    "runner.eval_every": "eval_steps val_check_interval",
    "runner.eval_episodes": "n_eval_episodes num_eval_episodes",
    "runner.stop_at_return": "early_stop_reward early_stopping_reward stop_reward stop_return stop_at_reward "
    "goal_reward goal_return reward_goal target_score solved_reward solved_at success_threshold target_reward "
    "reward_threshold target_return",
    "algorithm.name": "adv_estimator advantage_estimator adv_type algo",
    "algorithm.prompts": "num_prompts_per_step rollout_batch_size num_prompts",
    "algorithm.samples_per_prompt": "n_samples num_generations_per_prompt num_samples_per_prompt "
    "samples_per_question answers_per_prompt num_answers num_responses responses_per_question num_return_sequences "
    "rollouts_per_prompt responses_per_prompt "
    "completions_per_prompt num_completions n n_samples_per_prompt group_size "
    "num_return_sequences_in_group num_generations",
    "algorithm.max_new_tokens": "max_gen_len max_generation_length max_generated_tokens max_output_tokens "
    "max_output_length gen_len "
    "max_response_length response_length generate_max_len "
    "rollout_max_response_len max_tokens max_completion_length",
    "algorithm.max_prompt_length": "prompt_max_len prompt_length rollout_max_prompt_len max_prompt_len",
    "algorithm.train_batch": "train_global_batch_size global_batch_size",
    "algorithm.dual_clip": "c_clip ratio_clip_c clip_ratio_c",
    "algorithm.kl_estimator": "kl_type kl_penalty kl_penalty_type kl_loss_type",
    "algorithm.kl_coef": "kl_ctl kl kl_weight init_kl_coef kl_beta beta kl_loss_coef",
    "algorithm.entropy_coef": "entropy_loss_weight entropy_weight ent_weight entropy_bonus entropy_loss_coef",
    "algorithm.gamma": "gae_gamma discount discount_factor",
    "algorithm.gae_lambda": "lam lambda lambd",
    "algorithm.rollout_steps": "n_steps num_steps rollout_length horizon horizon_length "
    "num_steps_per_env rollout_fragment_length",
    "algorithm.num_minibatches": "n_minibatches minibatches nminibatches num_mini_batches",
    "algorithm.epochs": "update_epochs_per_batch noptepochs k_epochs ppo_epochs update_epoch update_epochs n_epochs "
    "num_epochs mini_epochs "
    "num_learning_epochs num_sgd_iter",
    "algorithm.clip_ratio_low": "pg_clip pg_clip_low ratio_clip_min ratio_clip_eps clip clip_ratio eps_clip "
    "cliprange clip_range clip_eps eps_clip_low epsilon "
    "clip_param clip_coef clip_epsilon e_clip",
    "algorithm.clip_ratio_high": "eps_clip_higher pg_clip_high ratio_clip_max clip_higher clip_high eps_clip_high "
    "clip_eps_high epsilon_high",
    "algorithm.value_clip": "clip_value value_clip_range vf_clip_range clip_range_value "
    "cliprange_value value_clip_eps clip_range_vf",
    "algorithm.value_coef": "value_loss_weight value_weight vf_coef value_loss_coef critic_coef vf_loss_coeff",
    "algorithm.normalize_advantages": "advantage_batch_normalize norm_adv adv_norm normalize_adv",
    "algorithm.normalize_observations": "obs_norm norm_obs normalize_obs normalize_input",
    "algorithm.normalize_rewards": "reward_norm norm_reward normalize_reward",
    "algorithm.loss": "loss_agg_mode",
    "algorithm.ratio": "importance_sampling_level",
    "algorithm.dynamic_sampling": "filter_groups",
    "algorithm.sequence_length": "max_total_sequence_length seq_length rollout_max_context_len max_seq_length "
    "max_sequence_length cutoff_len max_model_len max_seq_len "
    "vllm_max_model_length vllm_max_model_len",
    "env.total_num_envs": "envs num_env n_env nenvs env_count number_of_envs n_parallel_envs total_envs num_envs "
    "n_envs num_parallel num_parallel_envs parallel_envs",
    "env.id": "env_id gym_id env_name environment",
    "env.kind": "simulator_type simulator sim_type env_type",
    "env.max_episode_steps": "episode_length max_episode_length max_episode_len time_limit",
    "env.system": "system_prompt system_message",
    "env.chat": "apply_chat_template",
    "critic.warmup_iterations": "critic_warmup freezing_actor_steps",
    "reward.url": "remote_rm_url",
    "reward.head": "value_head_prefix",
    "runner.seed": "seeds random_seed random_state",
    "faults.on_poison": "on_nan nan_policy on_nonfinite on_non_finite on_inf nan_action",
    "env.max_turns": "num_turns n_turns max_rounds max_user_turns max_assistant_turns max_interactions",
    "serve.host": "bind bind_address bind_host listen listen_address server_host hostname",
    "serve.port": "listen_port server_port http_port",
    "serve.session_timeout_s": "idle_timeout client_timeout session_timeout",
    "serve.body": "max_body max_body_size max_request_size",
    "serve.model_name": "served_model_name",
    "serve.models": "max_models",
    "faults.restarts": "num_restarts restart_limit max_worker_restarts "
    "max_recoveries max_restarts",
    "resume": "resume_path resume_from resume_from_path resume_from_checkpoint resume_mode load_checkpoint "
    "load_from_checkpoint load_path restore",
    ".optimizer": "optim",
    ".optimizer.lr": "learning_rate",
    ".optimizer.beta1": "adam_beta1",
    ".optimizer.beta2": "adam_beta2",
    ".optimizer.eps": "adam_eps adam_epsilon",
    ".optimizer.on_host": "optimizer_cpu_offload adam_offload",
    ".optimizer.max_grad_norm": "gradient_clipping clip_grad_norm grad_clip clip_grad max_norm",
    ".optimizer.warmup_steps": "num_warmup_steps lr_warmup_iters lr_warmup_steps",
    ".optimizer.schedule": "lr_scheduler_type lr_scheduler lr_schedule lr_decay_style",
    ".model.activation": "activation_fn act_fn nonlinearity",
    ".model.hidden": "hidden_layer_sizes net_arch hidden_sizes hidden_dims hidden_layers mlp_units",
    ".lora_rank": "lora_r lora",
    ".lora_targets": "target_modules lora_target_modules",
    ".model.initial_log_std": "log_std_init",
    ".compute": "mixed_precision",
    ".zero_stage": "zero deepspeed_stage ds_stage",
    ".checkpointing": "activation_checkpointing recompute use_gradient_checkpointing gradient_checkpointing "
    "enable_gradient_checkpointing",
    ".activation_offload": "enable_activation_offload enable_activation_offloading activation_offloading",
    ".micro_batch": "micro_train_batch_size_per_gpu train_micro_batch_size micro_batch_size "
    "micro_batch_size_per_gpu micro_train_batch_size "
    "ppo_micro_batch_size_per_gpu per_device_train_batch_size log_prob_micro_batch_size_per_gpu",
    ".token_budget": "max_tokens_per_mb max_tokens_per_gpu ppo_max_token_len_per_gpu train_max_tokens_per_gpu",
    ".weights": "model_dtype",
    "rollout.engine": "backend rollout_backend",
    "rollout.action_chunk": "chunk_size num_action_chunks action_horizon",
    "rollout.pipeline_stage_num": "pipeline_stages num_pipeline_stages num_stages",
    "rollout.top_p": "nucleus_p nucleus nucleus_sampling",
    "rollout.step_sequences": "max_running_requests max_num_sequences max_num_seqs",
    "rollout.step_tokens": "max_num_batched_tokens",
    "rollout.stop": "stop_sequences stop_strings stop_words",
    "rollout.gpu_memory_utilization": "gpu_mem_util gpu_memory_util gpu_memory_fraction vllm_gpu_memory_utilization",
    "rollout.cache_dtype": "kv_cache_dtype",
    "rollout.enable_offload": "vllm_enable_sleep vllm_enable_sleep_mode enable_sleep_mode",
    ".enable_offload": "deepspeed_enable_sleep offload_train",
    "reference.enable_offload": "ref_reward_offload",
    "reference.micro_batch": "logprob_batch_size infer_batch_size micro_forward_batch_size_per_gpu",
    "rollout.min_tokens": "min_new_tokens",
    "runner.eval_temperature": "val_temperature",
    "runner.eval_top_p": "val_top_p",
}
KEYS: Mapping[str, str] = {
    theirs: ours for ours, names in _KEYS.items() for theirs in names.split()
}
# A coefficient is a weight as well: kl_loss_weight
_WEIGHTS = {
    theirs.replace("coef", "weight"): ours
    for theirs, ours in KEYS.items()
    if theirs.endswith("_coef")
}
KEYS = {**_WEIGHTS, **KEYS}
# Names of other libraries for keys of the off-policy job, where they are not those of the other jobs
_OFF_POLICY_KEYS = {
    "algorithm.learning_starts": "warmup_timesteps warmup warm_up learning_start random_steps start_steps "
    "warmup_steps num_random_steps start_timesteps "
    "num_steps_sampled_before_learning_starts initial_random_steps",
    "algorithm.updates_per_step": "utd_ratio utd replay_ratio gradient_updates_per_step",
    "algorithm.temperature": "ent_coef entropy_coef alpha",
    "algorithm.n_step": "n_steps nstep multi_step",
    "algorithm.batch_size": "minibatch_size train_batch_size",
    "algorithm.tau": "polyak_tau tau_polyak target_tau soft_target_tau",
    "algorithm.target_entropy": "target_ent",
    "algorithm.epsilon_steps": "eps_decay epsilon_decay eps_decay_steps epsilon_decay_steps exploration_steps "
    "eps_timesteps epsilon_timesteps",
    "algorithm.target_every": "target_update_interval target_network_frequency",
    "algorithm.policy_delay": "policy_freq policy_frequency policy_update_freq actor_update_interval",
    "algorithm.exploration_noise": "expl_noise action_noise explore_noise explore_noise_std exploration_noise_std "
    "expl_noise_std exploration_std action_noise_std",
    "algorithm.target_noise": "policy_noise target_policy_noise",
    "algorithm.target_noise_clip": "noise_clip",
    "algorithm.epsilon_start": "exploration_initial_eps start_e eps_start",
    "algorithm.epsilon_end": "epsilon_min eps_min min_epsilon "
    "exploration_final_eps end_e eps_end",
    "replay": "replay_buffer replay_buffer_config buffer memory_buffer",
    "replay.demonstrations": "dataset dataset_path dataset_file demonstration_path demo_path demos offline_data "
    "offline_dataset data_path input",
    "replay.capacity": "buffer_size replay_size replay_buffer_size memory_size",
    "actor.lr": "learning_rate policy_lr actor_lr",
    "actor.critic_lr": "q_lr qf_lr critic_learning_rate",
    "actor.hidden": "hidden_layer_sizes net_arch hidden_sizes hidden_dims hidden_layers mlp_units",
    "actor.critics": "num_q_networks n_q_networks num_q n_q ensemble_size "
    "n_critics num_critics num_qs",
    "actor.layer_norm": "use_layer_norm critic_layer_norm",
    "algorithm.double": "double_dqn double_q use_double",
    "replay.priority_exponent": "per_alpha prioritized_replay_alpha priority_alpha",
    "replay.priority_correction": "per_beta prioritized_replay_beta priority_beta",
}
OFF_POLICY_KEYS: Mapping[str, str] = {
    theirs: ours for ours, names in _OFF_POLICY_KEYS.items() for theirs in names.split()
}
# Names for the keys of an item that names code: its name, and its arguments
_NAMES_OF_ITEMS = {
    **dict.fromkeys(
        ("class", "cls", "type", "id", "kind", "target", "_target_"), "name"
    ),
    **dict.fromkeys(
        ("args", "arguments", "params", "parameters", "options", "config"), "kwargs"
    ),
}
# Names that have this meaning in one block only.
BELOW: Mapping[str, Mapping[str, str]] = {
    "rollout": {
        "name": "rollout.engine",
        "offload_to_cpu": "rollout.enable_offload",
        "enable_sleep_mode": "rollout.enable_offload",
        "vllm_enable_sleep": "rollout.enable_offload",
    },
    "env": {
        "name": "env.id",
        "task": "env.id",
        "max_steps": "env.max_episode_steps",
        "offload_to_cpu": "env.enable_offload",
        "horizon": "env.max_episode_steps",
    },
    "algorithm": {
        "num_iterations": "algorithm.epochs",
        "mu": "algorithm.epochs",
        "tau": "algorithm.gae_lambda",
    },
    "cluster.accelerator": {
        "type": "cluster.accelerator.kind",
        "vram": "cluster.accelerator.memory",
    },
    "actor.optimizer": {
        **dict.fromkeys(("type", "name"), "actor.optimizer.kind"),
        "epsilon": "actor.optimizer.eps",
    },
    "critic.optimizer": {
        **dict.fromkeys(("type", "name"), "critic.optimizer.kind"),
        "epsilon": "critic.optimizer.eps",
    },
    "serve": {"timeout": "serve.session_timeout_s"},
    "critic": {
        "warmup": "critic.warmup_iterations",
        "offload_to_cpu": "critic.enable_offload",
    },
    "reward": dict.fromkeys(("coef", "scale", "coefficient"), "reward.weight"),
    **{
        role: {"offload_to_cpu": f"{role}.enable_offload"}
        for role in ("reference", "teacher")
    },
    "replay": {
        "alpha": "replay.priority_exponent",
        "beta": "replay.priority_correction",
        "size": "replay.capacity",
        **dict.fromkeys(("type", "kind"), "replay.sampling"),
        **dict.fromkeys(("path", "file", "dataset"), "replay.demonstrations"),
    },
    "actor.model": {
        "log_std": "actor.model.initial_log_std",
        "type": "actor.model.kind",
        **dict.fromkeys(
            ("num_layers", "n_layers", "n_layer", "depth", "num_hidden_layers"),
            "actor.model.layers",
        ),
        **dict.fromkeys(
            ("num_heads", "n_heads", "n_head", "num_attention_heads"),
            "actor.model.heads",
        ),
        **dict.fromkeys(
            ("d_model", "embed_dim", "hidden_dim", "hidden_size", "dim"),
            "actor.model.width",
        ),
        "patch_size": "actor.model.patch",
        **dict.fromkeys(
            ("vlm_path", "model_path", "name_or_path", "model_name_or_path"),
            "actor.model.path",
        ),
        "rnn": "actor.model.memory",
        **dict.fromkeys(
            ("num_steps", "num_inference_steps", "num_denoising_steps", "flow_steps"),
            "actor.model.denoising_steps",
        ),
    },
    "cluster": {
        "placement": "cluster.component_placement",
        "ray_address": "cluster.ray.address",
        "gpus": "cluster.accelerators_per_node",
    },
    # Of an item of the list, whose keys are named without their path
    "cluster.changes": {
        **dict.fromkeys(
            ("at", "when", "iteration", "step", "from", "start", "after_iteration"),
            "after",
        ),
        **dict.fromkeys(
            ("placement", "place", "to", "components"), "component_placement"
        ),
    },
    "cluster.nodes": {
        **dict.fromkeys(
            (
                "num_gpus",
                "n_gpus",
                "gpus",
                "gpu_count",
                "num_accelerators",
                "devices",
                "gpus_per_node",
            ),
            "accelerators",
        ),
        **dict.fromkeys(
            (
                "gpu_type",
                "gpu",
                "gpu_name",
                "gpu_model",
                "type",
                "accelerator_type",
                "device_type",
                "accelerator",
            ),
            "product",
        ),
        **dict.fromkeys(
            ("num", "n", "nodes", "num_nodes", "number", "machines", "replicas"),
            "count",
        ),
        **dict.fromkeys(
            ("ram", "host_ram", "cpu_memory", "system_memory", "main_memory"),
            "host_memory",
        ),
        **dict.fromkeys(("vram", "gpu_memory", "memory_per_gpu", "hbm"), "memory"),
        **dict.fromkeys(("nvlink", "nvlink_bandwidth"), "nvlink_gb_per_s"),
        **dict.fromkeys(("pcie", "pcie_bandwidth"), "pcie_gb_per_s"),
        **dict.fromkeys(
            ("network", "network_bandwidth", "bandwidth", "infiniband", "ib"),
            "network_gb_per_s",
        ),
    },
    "env.rewards": {
        **_NAMES_OF_ITEMS,
        **dict.fromkeys(
            (
                "func",
                "fn",
                "function",
                "reward",
                "reward_fn",
                "reward_func",
                "reward_function",
            ),
            "name",
        ),
        **dict.fromkeys(
            ("coef", "coefficient", "scale", "w", "factor", "reward_weight"), "weight"
        ),
    },
    "env.wrappers": _NAMES_OF_ITEMS,
    "runner.callbacks": _NAMES_OF_ITEMS,
    # verl's block of the data set
    "data": {
        "train_batch_size": "algorithm.prompts",
        "max_prompt_length": "algorithm.max_prompt_length",
        "max_response_length": "algorithm.max_new_tokens",
    },
    "rollout.val_kwargs": {
        "temperature": "runner.eval_temperature",
        "n": "runner.eval_samples",
        "top_p": "runner.eval_top_p",
    },
    "checkpoint": {
        "interval": "checkpoint.every",
        "frequency": "checkpoint.every",
        "freq": "checkpoint.every",
        **dict.fromkeys(("dir", "folder", "path", "output_dir"), "runner.output_dir"),
    },
}
# The same without separators: groupSize and groupsize mean group_size
_SQUEEZED: Mapping[str, str] = {
    theirs.replace("_", ""): ours for theirs, ours in KEYS.items()
}
# Last parts of keys that other libraries use for the length of a run, in environment steps.
ENV_STEPS = (
    "total_env_steps",
    "total_timesteps",
    "n_timesteps",
    "num_timesteps",
    "max_timesteps",
    "num_env_steps",
    "total_num_steps",
    "max_env_steps",
    "timesteps",
)
# Names of sinks that are keys of their own in other libraries: `wandb: true`.
_SWITCHED_SINKS = ("wandb", "tensorboard", "mlflow", "swanlab")
_USUAL_SINKS = ("console", "jsonl", "tensorboard")
_LISTS_OF_SINKS = ("logger", "loggers", "report_to", "log_with", "trackers", "logging")
# Names of the key that says how advantages are estimated
_ESTIMATORS = ("adv_type", "adv_estimator", "advantage_estimator")
# Switches of a memory that draws large errors more often
_PRIORITIES = (
    "per",
    "use_per",
    "prioritized",
    "prioritized_replay",
    "prioritised_replay",
)
# Algorithms that rlplace does not have, and functions of layers, with names close to some that it has
_ABSENT = (
    *("dpo", "kto", "orpo", "ipo", "sft", "gppo", "ppg"),
    *("elu", "gelu", "selu", "celu", "leaky_relu", "leakyrelu", "prelu", "mish"),
)
# Words of a value beside the one that says what is chosen
_SAY_NOTHING = (
    *("mixed", "true", "amp", "precision", "dtype", "torch", "mode", "type", "only"),
    *(
        "cell",
        "layer",
        "network",
        "nn",
        "the",
        "use",
        "default",
        "optimizer",
        "engine",
        "scheduler",
        "algorithm",
    ),
)
# Arguments of vLLM's engine for which rlplace has no key
_OF_VLLM = (
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "quantization",
    "block_size",
    "swap_space",
)
# Strategy of data parallelism -> what its ranks share
_ZERO_STAGES = {"fsdp": 3, "fsdp2": 3, "zero3": 3, "zero2": 2, "zero1": 1, "ddp": 0}
# Switch of a policy with memory -> its layer
_MEMORIES = {"lstm": "lstm", "gru": "gru", "rnn": "gru", "recurrent": "gru"}
_POLICIES = {"MlpPolicy": "mlp", "CnnPolicy": "cnn"}
# Keys of a language model's config.json that give its sizes, and the folder of the model.
MODEL_SIZES = (
    "path",
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
# Keys of a config.json that are near one of MODEL_SIZES and are no misspelling of it.
OTHER_MODEL_SIZES = (
    "v_head_dim",
    "intermediate_size_mlp",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
)
# Keys of other libraries -> why rlplace needs none.
NEEDLESS = {
    **dict.fromkeys(
        ("mem", "mem_per_gpu", "time", "constraint", "exclusive", "nodelist", "array"),
        "it is an option of Slurm: sbatch takes it, with scripts/slurm.sbatch",
    ),
    "api_key": "keys are not written in a config: api_key_env names the variable of the environment that has it",
    "precision": "weights and compute of the component, and dtype of rollout, say it",
    "use_gae": "advantages of PPO are estimated by GAE; gae_lambda: 1.0 makes them sums of rewards",
    "is_lora": "LoRA is trained if the component has lora_rank",
    "use_peft": "LoRA is trained if the component has lora_rank",
    "use_remove_padding": "samples are always packed without padding",
    "packing": "samples are always packed without padding",
    "packing_samples": "samples are always packed without padding",
    "use_liger": "losses and layers are those of rlplace and transformers",
    "use_liger_kernel": "losses and layers are those of rlplace and transformers",
    "use_fused_kernels": "losses and layers are those of rlplace and transformers",
    "attn_implementation": "attention follows from the accelerator and from packing",
    "flash_attn": "attention follows from the accelerator and from packing",
    "use_flash_attn": "attention follows from the accelerator and from packing",
    "trust_remote_code": "code from a model's folder is never executed",
    "tokenizer_path": "the tokenizer is read from the model's folder",
    "tokenizer": "the tokenizer is read from the model's folder",
    "external_lib": "modules are imported only where a config names package.module:Name",
    "use_shm": "the model is read from its folder",
    **dict.fromkeys(
        ("optimizer_name", "optimizer_type", "optimizer_kind"),
        "the policies of simulators learn by Adam, with decoupled weight decay",
    ),
    "ortho_init": "the layers of a policy are initialised orthogonally",
    **dict.fromkeys(
        ("logging_steps", "logging_first_step", "logging_strategy"),
        "metrics of every iteration are written",
    ),
    "framework": "everything is trained with torch",
    "disable_dropout": "models are trained without dropout",
    "shuffle": "prompts and samples are drawn in random order",
    **dict.fromkeys(
        ("use_torch_compile", "torch_compile", "compile"),
        "passes of training are not compiled; rollout.enforce_eager: false compiles those of the engine",
    ),
    "load_in_4bit": "weights of 4 and 8 bits are not trained",
    "load_in_8bit": "weights of 4 and 8 bits are not trained",
    "training_backend": "the actor is trained by FSDP; its zero_stage says what ranks share",
}
_ENGINE_LAYERS = "the engine decides by itself"
# Keys of other libraries for what rlplace does not have or chooses elsewhere -> what is there in its place.
ABSENT = {
    **dict.fromkeys(
        ("use_sde", "sde_sample_freq", "use_sde_at_warmup"),
        "noise of actions is drawn anew at every step",
    ),
    **dict.fromkeys(
        (
            "verbose",
            "log_every",
            "log_every_n_steps",
            "print_every",
            "log_interval",
            "progress",
            "progress_bar",
            "log_freq",
        ),
        "a line of each iteration is printed, and runner.sinks has all numbers",
    ),
    **dict.fromkeys(
        ("tensorboard_log", "tb_log_name", "use_tensorboard", "tensorboard_dir"),
        "runner.sinks has tensorboard, and its files are in the folder of the run, below runner.output_dir",
    ),
    **dict.fromkeys(
        ("capture_video", "record_video", "save_video", "render"),
        "a trained policy is filmed afterwards: python -m rlplace.evaluate <a run> video=play.gif",
    ),
    **dict.fromkeys(
        (
            "wandb_project_name",
            "wandb_project",
            "project_name",
            "wandb_entity",
            "wandb_org",
            "wandb_group",
            "wandb_run_name",
            "run_name",
            "exp_name",
            "experiment_name",
            "wandb_name",
        ),
        "the run in a tracker has the name of its folder; variables of the tracker set its project, such as "
        "WANDB_PROJECT and WANDB_ENTITY",
    ),
    **dict.fromkeys(
        ("save_model", "save_last_checkpoint", "save_hf_ckpt", "disable_ds_ckpt"),
        "every run saves its policy; checkpoint.every says how often",
    ),
    **dict.fromkeys(
        ("upload_model", "hf_entity", "push_to_hub", "hub_model_id"),
        "nothing is uploaded; python -m rlplace.export writes a model as files",
    ),
    **dict.fromkeys(
        ("torch_deterministic", "deterministic", "full_determinism"),
        "on a CPU, results follow from runner.seed alone",
    ),
    **dict.fromkeys(
        ("optimize_memory_usage", "replay_buffer_class", "replay_buffer_kwargs"),
        "the block replay has all keys of the memory",
    ),
    "micro_rollout_batch_size": "it is the batch of reference and reward models, and none is placed",
    **dict.fromkeys(
        (
            "dueling",
            "dueling_dqn",
            "use_dueling",
            "noisy_net",
            "noisy",
            "n_atoms",
            "v_min",
            "v_max",
            "n_quantiles",
        ),
        "the network has one value for each action",
    ),
    **dict.fromkeys(
        (
            "val_before_train",
            "eval_at_start",
            "eval_on_start",
            "skip_eval_before_train",
        ),
        "runner.eval_every says when held-out prompts are asked",
    ),
    "policy": "the networks are perceptrons; actor.hidden has the sizes of their layers",
    "log_completions": "runner.samples says how many samples of each iteration are kept to be read",
    "stats_window_size": "returns are means of the last 100 episodes",
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),
        "the reference stays as it is",
    ),
    "batch_mode": "an iteration has algorithm.rollout_steps steps of each environment, whole episodes or not",
    **dict.fromkeys(
        (
            "balance_batch",
            "load_format",
            "layered_summon",
            "dataloader_num_workers",
            "pin_memory",
            "drop_last",
        ),
        "it is decided without a key",
    ),
    "vllm_mode": "where engines are follows from component_placement",
    "vllm_sync_backend": "the transport of the weights follows from the placement",
    "vllm_sync_with_ray": "the transport of the weights follows from the placement",
    "weight_sync_backend": "the transport of the weights follows from the placement",
    "actor_init_on_gpu": "a component loads where its accelerators are",
    "max_concurrent_rollouts": "the engine takes rollout.step_sequences at a time",
    "use_dynamic_bsz": "a pass has token_budget tokens unless micro_batch is set",
    "use_dynamic_batch": "a pass has token_budget tokens unless micro_batch is set",
    "use_dynamic_batch_size": "a pass has token_budget tokens unless micro_batch is set",
    "image_size": "images are resized to the image size of the model",
    **dict.fromkeys(
        (
            "partition",
            "qos",
            "account",
            "cpus_per_task",
            "ntasks",
            "ntasks_per_node",
            "mem_per_cpu",
            "job_name",
        ),
        "it is an option of Slurm: sbatch takes it, with scripts/slurm.sbatch",
    ),
    **dict.fromkeys(
        (
            "master_addr",
            "master_port",
            "rdzv_backend",
            "rdzv_endpoint",
            "rdzv_id",
            "node_rank",
            "standalone",
        ),
        "one command starts all workers, by Ray; cluster.ray.address is the address of a running cluster",
    ),
    **dict.fromkeys(
        ("do_sample", "greedy"),
        "answers of training are drawn at rollout.temperature; those of an evaluation are greedy",
    ),
    "prompt_split": "a data set is read whole, as env.kwargs names it",
    "dataset_train_split": "a data set is read whole, as env.kwargs names it",
    "input_template": "env.chat says whether prompts get the chat template of the model",
    "remove_unused_columns": "columns of a row are read if env.kwargs names them",
    "zpg": "it is an option of DeepSpeed; the actor trains with FSDP2",
    "overlap_comm": "it is an option of DeepSpeed; the actor trains with FSDP2",
    "deepspeed": "the actor trains with FSDP2; actor.zero_stage says what its ranks share",
    "fsdp": "the actor trains with FSDP2; actor.zero_stage says what its ranks share",
    "ptx_coef": "nothing is learned from a data set of texts beside the rewards",
    "lora_dropout": "lora_rank, lora_alpha and lora_targets are all that LoRA has here",
    "tasks_per_gpu": _ENGINE_LAYERS,
    "vllm_generate_batch_size": _ENGINE_LAYERS,
    "disable_log_stats": _ENGINE_LAYERS,
    "async_train": "algorithm.max_staleness says how many versions behind answers may be",
    "fsdp_config": "actor.zero_stage, actor.checkpointing and actor.enable_offload say it for language models; "
    "policies of simulators are copied to each rank",
    "use_critic": "a critic is used if one is placed",
    "init_critic_from_actor": "the critic begins with the model of its block, or else of the actor",
}
_MODEL = {
    "path": "pretrained pretrained_model_name_or_path name model_name model_name_or_path name_or_path model_path "
    "pretrain hf_checkpoint",
    "num_hidden_layers": "num_layers n_layers layers",
    "num_attention_heads": "num_heads n_heads heads",
    "num_key_value_heads": "n_kv_heads",
    "hidden_size": "dim d_model hidden_dim",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocabulary_size vocabulary",
}
MODEL_NAMES: Mapping[str, str] = {
    theirs: ours for ours, names in _MODEL.items() for theirs in names.split()
}
_TENSOR = (
    "tensor_parallel_size",
    "tensor_model_parallel_size",
    "vllm_tensor_parallel_size",
    "rollout_num_gpus_per_engine",
    "tp_size",
    "tp",
)
_CONTEXT = (
    "context_parallel_size",
    "context_parallel",
    "ulysses_sequence_parallel_size",
    "ring_attn_size",
    "cp",
    "cp_size",
    "sp_size",
)
TENSOR = _TENSOR[0]
PARALLEL = dict.fromkeys(_TENSOR, TENSOR) | dict.fromkeys(_CONTEXT, _CONTEXT[0])
# Other names of keys in a line of component_placement.
PLACEMENT_KEYS = {
    **dict.fromkeys(
        (*_TENSOR[1:], "num_gpus_per_engine", "tensor_parallel"), _TENSOR[0]
    ),
    **dict.fromkeys(
        (
            "same",
            "colocate_with",
            "colocated_with",
            "collocate_with",
            "share_with",
            "with",
            "like",
        ),
        "same_as",
    ),
    **dict.fromkeys((*_CONTEXT[1:], "cp_size", "sp_size"), _CONTEXT[0]),
    **dict.fromkeys(("dp", "dp_size"), "data_parallel_size"),
    **dict.fromkeys(
        (
            "accelerator",
            "gpu",
            "device",
            "cuda",
            "gpus",
            "num_gpus",
            "gpu_ids",
            "devices",
            "device_mapping",
        ),
        "accelerators",
    ),
}
# Names of other libraries for the number of a machine, in a line of component_placement.
NODE_KEYS = ("node", "node_rank", "node_id", "node_index", "machine", "host")
COMPONENTS = {
    **dict.fromkeys(("ref", "ref_policy", "reference_model", "ref_model"), "reference"),
    **dict.fromkeys(("reward_model", "rm"), "reward"),
    **dict.fromkeys(("policy", "actor_train", "learner", "trainer"), "actor"),
    **dict.fromkeys(
        (
            "actor_infer",
            "vllm",
            "sglang",
            "generator",
            "generation",
            "engine",
            "engines",
            "sampler",
            "rollout_worker",
            "rollout_workers",
            "inference_engine",
        ),
        "rollout",
    ),
    **dict.fromkeys(("value", "value_model"), "critic"),
    **dict.fromkeys(
        (
            "simulator",
            "environment",
            "enviroment",
            "env_runner",
            "env_runners",
            "env_worker",
            "env_workers",
            "envs",
            "simulators",
        ),
        "env",
    ),
    **dict.fromkeys(("replay_buffer", "buffer"), "replay"),
    "inference": "",  # RLinf's component that recomputes log-probabilities; here the actor does that
}
# Name of another library -> components that it may mean equally well, where neither is placed
SEVERAL_COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "policy": ("actor", "rollout"),
    "model": ("actor", "rollout"),
    "worker": ("actor", "rollout", "env"),
    "workers": ("actor", "rollout", "env"),
}
# Component that a job may lack -> what does its work there.
WITHOUT_LINE = {
    "critic": "the actor has the networks that estimate values",
    "env": "rollout steps the environments",
    "inference": "the actor computes log-probabilities again",
    "reference": "the policy is not compared with a reference",
    "reward": "the simulator gives the rewards",
    "replay": "each iteration learns from new samples, and none are kept",
    **dict.fromkeys(
        ("target", "target_network", "target_networks", "target_critic"),
        "the actor has the target networks",
    ),
    **dict.fromkeys(
        ("optimizer", "evaluator", "eval", "evaluation", "driver", "logger"),
        "it is no component, and needs no place of its own",
    ),
}
# Word of rlplace -> words of other libraries.
_WORDS = {
    "bf16": "bfloat16 torch.bfloat16",
    "fp16": "float16 half torch.float16",
    "fp32": "float32 float torch.float32",
    "cuda": "gpu nvidia cuda:0 rocm a100 a800 h100 h800 h20 h200 b200 gb200 l40 l40s v100 a10 a6000 rtx3090 rtx4090 "
    "rtx5090 mi300x",
    "auto": "automatic learned learnable learn",
    "ray": "slurm kubernetes k8s distributed",
    "emulated": "cpu",
    "token": "token-mean token_mean",
    "sequence": "sequence-mean sequence_mean seq-mean-token-mean seq_mean_token_mean",
    "constant": "seq-mean-token-sum-norm constant_with_warmup",
    "k1": "kl",
    "k2": "mse",
    "k3": "low_var_kl",
    "adamw": "adamw_torch adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit adam_8bit adam8bit adamw8bit paged_adamw_8bit",
    "rloo": "rloo_baseline",
    "dr_grpo": "drgrpo dr.grpo dr-grpo",
    "transformers": "hf huggingface",
    "gymnasium": "gym mujoco maniskill mani_skill atari box2d classic_control robotics",
    "ppo": "ppo2",
    "silu": "swish",
    "tensorboard": "tb",
    "skip": "ignore",
    "distill": "distillation kd gkd opd on_policy_distillation on-policy-distillation",
    "vla": "openvla openvla_oft openvla-oft smolvla pi0",
    "prioritised": "priority td_error "
    "per prioritized prioritized_replay prioritizedreplaybuffer prioritizedepisodereplaybuffer "
    "multiagentprioritizedreplaybuffer",
    "uniform": "random replaybuffer episodereplaybuffer",
    "grpo": "group_norm",
    "reinforce_pp": "reinforce++ reinforce_plus_plus",
    "reinforce_pp_baseline": "reinforce++-baseline reinforce_plus_plus_baseline reinforce_baseline",
    "colocate_all": "collocated colocated colocate collocate_all",
}
_OURS = {theirs: ours for ours, words in _WORDS.items() for theirs in words.split()}
# Algorithms for simulators that rlplace does not have, or has as a setting of another algorithm.
_A2C = {
    "name": "ppo",
    "epochs": 1,
    "num_minibatches": 1,
    "rollout_steps": 5,
    "gae_lambda": 1.0,
    "normalize_advantages": False,
}
OF_SIMULATORS: Mapping[str, Mapping[str, object]] = {
    "a2c": _A2C,
    "gae": {"name": "ppo"},
}
OF_TEXT: Mapping[str, Mapping[str, object]] = {
    "gspo": {"name": "grpo", "ratio": "sequence", "loss": "sequence"},
    "cispo": {"name": "grpo", "surrogate": "cispo"},
}
# In the off-policy job; a key with a dot belongs to another block
OF_REPLAY: Mapping[str, Mapping[str, object]] = {
    "ddpg": {
        "name": "td3",
        "policy_delay": 1,
        "target_noise": 0.0,
        "actor.critics": 1,
    },
    "ddqn": {"name": "dqn", "double": True},
    "double_dqn": {"name": "dqn", "double": True},
}
# Algorithms without a replay memory
ON_POLICY = ("ppo", "a2c", "trpo", "grpo", "reinforce")
_OFF_POLICY = (
    "sac",
    "td3",
    "ddpg",
    "dqn",
    "rainbow",
    "c51",
    "qr_dqn",
    "tqc",
    "crossq",
    "redq",
    "droq",
    "her",
)
# Top-level blocks that only a file of another library has.
LIBRARIES = {
    "actor_rollout_ref": "verl",
    "actor_train": "roll",
    "actor_infer": "roll",
    "generator": "skyrl",
    "gconfig": "areal",
    "trainer": "verl",
    "data": "verl",
    "grpo": "nemo_rl",
    "loss_fn": "nemo_rl",
}
# A block of LIBRARIES that others have as well
DATA = "data"
# Kinds of parallelism for which rlplace has no key.
NO_SUCH = (
    "there is no pipeline or expert parallelism; tensor_parallel_size "
    "splits a model, context_parallel_size tokens"
)
SPLITS = ("pipeline", "expert", "context", "sequence", "pp", "ep", "cp", "sp")


@functools.cache
def another_measure() -> Mapping[str, tuple[str, str]]:
    """Return name -> (key, difference), for each key of other libraries whose values mean something else here."""
    rows = tomllib.loads(
        Path(__file__).with_name("another_measure.toml").read_text(encoding="utf-8")
    )
    return {theirs: (ours, why) for theirs, (ours, why) in rows.items()}


def in_our_words(name: str, value: object) -> tuple[str, object] | None:
    """Return (key, value) of rlplace for a key of other libraries whose values have another form; None for other keys.

    `name`: last part of the key, such as `report_to`. `value`: its value, such as `wandb`.
    """
    # An option of a command line has a text: --anneal-lr False
    if str(value).lower() in ("true", "false"):
        value = str(value).lower() == "true"
    # A block of the tracker's own settings, such as its project
    is_on = isinstance(value, Mapping) and value.get("enabled", True) is True
    if name in _SWITCHED_SINKS and (value is True or is_on):
        return "runner.sinks", [*_USUAL_SINKS, name]
    if name in _LISTS_OF_SINKS:
        named = [value] if isinstance(value, str) else value
        if isinstance(named, list):
            sinks = [*dict.fromkeys([*_USUAL_SINKS, *named])]
            if "console" in named:
                # The whole list, not what is added to the usual sinks
                sinks = named
            if named and all(
                sink in (*_USUAL_SINKS, *_SWITCHED_SINKS) for sink in named
            ):
                return "runner.sinks", sinks
    if (
        name in ("resume", "resume_from_checkpoint", "load_checkpoint")
        and value is True
    ):
        return "resume", "auto"
    if name == "resume_mode" and value == "disable":
        return "resume", None
    if name in _ESTIMATORS and value == "gae":
        # The only algorithm with GAE
        return "algorithm.name", "ppo"
    if name in _OF_VLLM:
        return "rollout.engine_args", {name: value}
    if name in (
        "reward_function",
        "reward_fn",
        "reward_func",
        "reward_funcs",
        "reward_functions",
    ):
        functions = value if isinstance(value, list) else [value]
        if all(isinstance(function, str) for function in functions):
            return "env.rewards", [{"name": function} for function in functions]
    gres = re.fullmatch(r"gpu(?::[\w.-]+)?:([0-9]+)", str(value))
    if name in ("gres", "gpus_per_node") and gres is not None:
        return "cluster.accelerators_per_node", int(gres[1])
    if name == "device" and isinstance(value, str):
        kind = meant_word(value, ("auto", "cuda", "emulated"))
        return ("cluster.accelerator.kind", kind) if kind else None
    if name in ("ent_coef", "alpha") and str(value).startswith("auto"):
        # auto_0.1: the learned weight begins with 0.1
        return "algorithm.temperature", "auto"
    if name in ("init_temperature", "init_alpha", "initial_alpha"):
        # It is where a learned weight begins
        return "algorithm.temperature", "auto"
    automatic = (
        "autotune",
        "automatic_entropy_tuning",
        "auto_entropy",
        "learn_temperature",
    )
    if name in automatic and value is True:
        return "algorithm.temperature", "auto"
    if name in _PRIORITIES and value is True:
        return "replay.sampling", "prioritised"
    if name == "env_wrapper" and isinstance(value, str) and "." in value:
        module, _, kind = value.replace(":", ".").rpartition(".")
        return "env.wrappers", [{"name": f"{module}:{kind}"}]
    if name == "policy" and isinstance(value, str) and value in _POLICIES:
        return "actor.model.kind", _POLICIES[value]
    if name in ("anneal_lr", "lr_anneal") and isinstance(value, bool):
        return "actor.optimizer.schedule", "linear" if value else "constant"
    if name in ("track", "use_wandb") and value is True:
        return "runner.sinks", [*_USUAL_SINKS, "wandb"]
    if name == "cuda" and isinstance(value, bool):
        return "cluster.accelerator.kind", "cuda" if value else "emulated"
    if name == "bf16" and value is True:
        return "actor.compute", "bf16"
    if name == "use_vllm" and value is True:
        return "rollout.engine", "vllm"
    if name == "use_kl_in_reward" and value is True:
        return "algorithm.kl_in", "reward"
    if name == "filter_overlong_prompts" and value is True:
        return "env.long_prompts", "drop"
    if name in ("simulator_type", "sim_type", "env_type"):
        library = meant_word(value, ("gymnasium", "envpool", "pettingzoo"))
        return ("env.kind", library) if library else None
    if name.removeprefix("use_") in _MEMORIES and value is True:
        return "actor.model.memory", _MEMORIES[name.removeprefix("use_")]
    if name == "render_mode":
        return "env.kwargs", {name: value}
    if name == "net_arch":
        # Two equal networks, as for Stable-Baselines3
        parts = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(parts, Mapping) and parts.get("pi") == parts.get("vf"):
            return "actor.model.hidden", parts.get("pi")
    if name == "strategy" and str(value).lower() in _ZERO_STAGES:
        return "actor.zero_stage", _ZERO_STAGES[str(value).lower()]
    if name in ("overlong_filtering", "mask_truncated_completions") and value is True:
        return "algorithm.truncated", "mask"
    return None


def in_several_keys(name: str, value: Any) -> Mapping[str, object]:
    """Return key -> value for a key of other libraries that says what several keys of rlplace say; {} for other keys.

    A key with a leading dot belongs below the component's block. `name`: last part of the key. `value`: its value.
    """
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    if name in ("betas", "adam_betas") and is_pair:
        first, second = value
        return {".optimizer.beta1": first, ".optimizer.beta2": second}
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    both_sides = (
        *("eps_clip_low_high", "clip_range_low_high", "clip_ratio_range"),
        *("clip_ratio_low", "clip_range", "cliprange", "clip_ratio", "eps_clip"),
    )
    if name in both_sides and is_pair:
        low, high = value
        return {"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high}
    if name in ("epsilon", "eps", "epsilon_range") and is_pair:
        return {"algorithm.epsilon_start": value[0], "algorithm.epsilon_end": value[1]}
    if name == "reward_clip_range" and is_pair and value[0] == -value[1]:
        return {"algorithm.reward_clip": value[1]}
    if name == "micro_rollout_batch_size":
        return {"reference.micro_batch": value, "reward.micro_batch": value}
    # As in the zoo of Stable-Baselines3: a learning rate that falls to 0
    falling = re.fullmatch(r"lin_([0-9.e-]+)", str(value))
    if name in ("learning_rate", "lr") and falling is not None:
        return {".optimizer.lr": float(falling[1]), ".optimizer.schedule": "linear"}
    # With the word of its schedule behind it: 3e-4 linear
    course = re.fullmatch(
        r"([0-9.]+(?:e-?[0-9]+)?)[ ,]*\(?(linear|cosine|constant)(?:[ _]decay)?\)?",
        str(value).strip().lower(),
    )
    if name in ("learning_rate", "lr") and course is not None:
        return {".optimizer.lr": float(course[1]), ".optimizer.schedule": course[2]}
    as_loss = (
        "kl_loss_coef",
        "beta",
        "kl_beta",
        "kl_loss_weight",
        "reference_policy_kl_penalty",
    )
    if name in as_loss and is_number and value:
        # Of the estimators, k1 has no gradient as a loss
        return {
            "algorithm.kl_coef": value,
            "algorithm.kl_in": "loss",
            "algorithm.kl_estimator": "k3",
        }
    return {}


def key_of(block: str, name: str) -> str | None:
    """Return the key of rlplace that has the meaning of a key of other libraries; None if there is none.

    A key with a leading dot belongs below the component's block. `block`: path of the block with the key. `name`: last
    part of the key, in any spelling: `group_size`, `groupSize`.
    """
    return (
        BELOW.get(block, {}).get(name)
        or KEYS.get(name)
        # A single letter has its case: -N of Slurm, and n
        or (_SQUEEZED.get(re.sub("[-_]", "", name).lower()) if name[1:] else None)
    )


def off_policy(name: object) -> bool:
    """Return whether `name` is the name of a known off-policy algorithm, such as SAC."""
    return str(name).lower() in _OFF_POLICY


def as_settings(
    name: object, *, typed: bool, among: Mapping[str, Mapping[str, object]]
) -> str | None:
    """Return settings of rlplace for an algorithm that it has under another name, such as a2c; else None.

    `typed`: form of the result. True: overrides for a command line. False: lines of a config file. `among`: name -> its
    settings, for the kind of job.
    """
    settings = among.get(str(name).lower())
    if settings is None:
        return None
    sign = "=" if typed else ": "
    lines = []
    for key, value in settings.items():
        path = key if "." in key else f"algorithm.{key}"
        lines.append(f"{path}{sign}{show(value)}")
    if not typed:
        # The name is replaced where it stands; the others may stand anywhere
        lines[0] = lines[0].removeprefix("algorithm.")
        if len(lines) > 1:
            lines[-1] += "        (lines with a dot without indent)"
    return " ".join(lines) if typed else "\n".join(lines)


def meant_word(value: object, words: Iterable[str]) -> str | None:
    """Return the word in `words` that is meant by `value`; None if this is unknown.

    `value` may be the word itself, its name in a different library (such as `bfloat16` for `bf16`), or a misspelling.
    """
    known = list(words)
    if str(value).strip() in known:
        return str(value).strip()
    ours = _OURS.get(str(value).lower()) or _POLICIES.get(str(value))
    if ours in known:
        return ours
    # A class of a module, such as nn.ReLU
    last = str(value).rpartition(".")[2].lower()
    if last in known:
        return last
    if str(value).lower() in _ABSENT:
        return None
    # The only word of a text that says anything: bf16-mixed, torch.bfloat16_amp
    parts = re.split(r"[^a-z0-9]+", str(value).lower())
    telling = [part for part in parts if part and part not in _SAY_NOTHING]
    if len(telling) == 1 and telling != [str(value).lower()]:
        only = _OURS.get(telling[0], telling[0])
        if only in known:
            return only
    # A word that ends early, or goes on: lin and linear_decay for linear
    begun = [word for word in known if word.startswith(last) and len(last) > 2]
    # Of sequence and sequence_token, seq is the first one
    as_many_parts = [word for word in begun if word.count("_") == last.count("_")]
    begun = as_many_parts or begun
    ends = r"_(?:decay|schedule|annealing|v[0-9]+)"
    longer = [word for word in known if re.fullmatch(f"{re.escape(word)}{ends}", last)]
    if len(begun) == 1 or (len(longer) == 1 and not begun):
        return [*begun, *longer][0]
    return did_you_mean(str(value), known)
