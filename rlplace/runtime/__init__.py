"""A job from its config to its end: prepared, launched, run, saved, resumed."""
