"""Rules that a job has to keep. `rule.py` says what a rule is; each other module has the rules of one subject."""
