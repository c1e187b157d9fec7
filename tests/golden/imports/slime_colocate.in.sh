ROLLOUT_ARGS=(
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --num-steps-per-rollout 1
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --recompute-granularity full   # keeps the input of each layer only
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 \
   --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 \
   ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]}
