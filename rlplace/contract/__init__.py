"""What the engine asks of a job: its components, stages, channels, memory, and what it saves and shows."""
