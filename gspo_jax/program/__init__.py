"""A config and a mesh become frozen settings and jitted functions."""
