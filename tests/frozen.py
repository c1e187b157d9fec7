"""Imported last by a server that forks processes: the collector of these leaves alone what was imported before.

It would read all objects of torch and transformers again in each process, and so copy their pages.
"""

from __future__ import annotations

import atexit
import gc

gc.collect()
gc.freeze()
# Libraries report frozen objects as leaked
atexit.register(gc.unfreeze)
