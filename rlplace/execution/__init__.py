"""Execute a schedule on launched worker groups: iterations, fault recovery, asynchronous rollout, memory checks."""
