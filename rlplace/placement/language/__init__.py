"""The placement language: what `cluster.component_placement` and `cluster.node_groups` say -> slots of ranks."""
