"""Simulators and text tasks behind their contracts; importing this imports no simulator library."""
