"""One file a run: `get_config()` returns every key of common.py."""
