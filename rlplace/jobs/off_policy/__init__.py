"""Off-policy learning with a replay memory: SAC, TD3 and DQN, acting and learning at the same time."""
