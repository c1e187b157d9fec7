"""The placement language: `cluster.component_placement` and `cluster.node_groups` -> slots of ranks."""
