"""GRPO, PPO and similar: env sends prompts, engines answer, scorers score the answers, actor and critic learn."""
