"""GRPO, PPO and relatives: env asks prompts, engines answer, scorers judge, actor and critic learn."""
