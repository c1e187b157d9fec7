"""The performance model of the job on language models."""
