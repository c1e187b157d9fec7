"""What a run shows: metrics on the console and in files, its end in numbers, its time as a picture."""
