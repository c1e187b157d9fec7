"""Workers of the off-policy job: rollout steps its environments, replay keeps steps, actor learns from samples."""
