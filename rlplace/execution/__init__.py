"""Execute a schedule with launched groups: iterations, faults, generation ahead, measured memory."""
