"""One file a run: `get_config()` returns every key of common.py.

A file of your own, in any folder, does `from gspo_jax.configs import common`.
"""
