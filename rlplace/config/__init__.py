"""The config of a job: its schema, and how it is composed, read and checked."""
