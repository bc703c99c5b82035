"""The cost of an iteration whose responses have given lengths."""

__all__ = ("cost", "decoding", "lengths")
