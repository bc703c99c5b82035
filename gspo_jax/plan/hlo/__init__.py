"""Reads the text of compiled HLO modules and computes what they cost.

The other modules of `plan` take these:
  module       parse: the text of a module into computations and instructions
  collectives  Collective: kind, group and bytes of a collective
  cost         HloCost and longest_loop: FLOPs, bytes and seconds, added up
  walk         walk: the HloCost of a module, with its loops multiplied out
"""

__all__ = ("collectives", "cost", "module", "walk")
