"""The memory proof: what every accelerator and host holds in each stage and on each entry, before anything starts."""
