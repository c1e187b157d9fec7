"""The machines: nodes, their accelerators, declared, counted or read from Ray."""
