"""Generation engines behind one contract, and how a rollout rank loads weights into its engine."""
