"""Shared memory of a node: channels between processes, and the folder of a job."""
