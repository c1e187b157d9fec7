"""Rules of the job on language models: one module for each subject."""
