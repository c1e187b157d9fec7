"""The commands: one module each, and how a command ends."""
