"""The config of a job: its schema, and how a config is composed, read and checked."""
