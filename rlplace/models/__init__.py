"""Policies of simulators and language models: built, sharded, filled, saved."""

from __future__ import annotations

import threading

# Models are built one at a time in a process whose workers are threads. While they build, transformers, peft and vLLM
# change process-wide state: torch's default dtype, how modules register parameters, how these are initialised. Two at
# once would see each other's changes, or leave one in place.
BUILDING = threading.Lock()
