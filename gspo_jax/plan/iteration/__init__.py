"""The cost of an iteration whose responses have given lengths."""
