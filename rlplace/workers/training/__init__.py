"""Training of one model over the ranks of a worker group."""
