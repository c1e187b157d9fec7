"""The life of a job, from its config to its end: prepare, launch, run, save, resume."""
