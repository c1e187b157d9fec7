"""The one place of the workers where Ray is imported: `session` joins it, `launcher` places `actors` in it."""
