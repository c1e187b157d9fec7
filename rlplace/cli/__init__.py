"""The commands, one module each, and helpers for exit codes."""
