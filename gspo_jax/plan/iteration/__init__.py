"""The cost of an iteration whose responses have given lengths.

The other modules of `plan` take these:
  lengths   draw: the lengths that `--lengths` describes
  decoding  the decode steps that they take
  cost      cost: the seconds of an iteration
"""

__all__ = ("cost", "decoding", "lengths")
