"""Starts a thread when it is imported, as a template must not."""

import threading
import time

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
