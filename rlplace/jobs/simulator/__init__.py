"""PPO on simulators: env steps them, rollout decides for them, actor learns."""
