"""Weight sync: shards of source ranks become whole weights at target ranks, each byte crossing to a node once."""
