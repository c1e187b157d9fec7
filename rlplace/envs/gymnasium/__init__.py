"""Gymnasium and MuJoCo simulators behind the adapter contract; importing this imports no simulator library."""
