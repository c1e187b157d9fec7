"""The commands of rlplace, one module for each command, and the functions `run` and `plan` for custom jobs."""
