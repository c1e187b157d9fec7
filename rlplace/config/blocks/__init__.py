"""The blocks of a config as frozen dataclasses: of the engine, of each job, and of training, which both jobs have.

Every field has its meaning in `doc`; the same text is the comment in the shipped YAML files.
"""
