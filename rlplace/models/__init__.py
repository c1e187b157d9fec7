"""Policies of simulators and language models: built, sharded, filled, saved."""

from __future__ import annotations

import threading

# Held while a model is built. Workers may be threads of one process, and transformers, peft and vLLM change
# process-wide state while they build: torch's default dtype, how modules register parameters, how parameters are
# initialised. Two builds at once would see each other's changes, or leave one in place.
BUILDING = threading.Lock()
