"""The jobs that come with the engine. Nothing outside imports them: the registry finds each by its name."""
