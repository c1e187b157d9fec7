# 70B on 48: one third engines, one third actor with its reference, one third critic with the reward model
NODE=8
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "."}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref.num_nodes 1 --ref.num_gpus_per_node $NODE \
   --reward.num_nodes 1 --reward.num_gpus_per_node $NODE \
   --critic.num_nodes 2 --critic.num_gpus_per_node $NODE \
   --actor.num_nodes 2 --actor.num_gpus_per_node $NODE \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 4 \
   --train.colocate_critic_reward --train.colocate_actor_ref \
   --ds.zero_stage 3 --ds.param_dtype bf16 --ds.adam_offload
