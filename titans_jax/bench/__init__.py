"""Measurements of speed and memory, printed by `titans bench`."""
