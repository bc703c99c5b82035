"""Processes, devices and files; it knows nothing of RL."""
