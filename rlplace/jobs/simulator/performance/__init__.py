"""The performance model of the job on simulators."""
