"""What a run shows: metrics on the console and in files, a summary in numbers, and pictures and pages about the run."""
