"""Weight sync: actor ranks' shards become whole weights at all rollout ranks, each byte crossing to a node once."""
