"""The machines: nodes, their accelerators and links, declared, counted or read from Ray."""
