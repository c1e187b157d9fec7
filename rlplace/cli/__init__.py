"""The command lines: what is checked before anything starts, the plan, the run."""
