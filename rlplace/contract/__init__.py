"""The interface between engine and job: components, stages, channels, memory, saved state, shown metrics."""
