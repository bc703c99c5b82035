"""What a compiled program costs on a TPU, read out of libtpu's text dump.

`plan` calls `cost_of` alone; all else here follows from the format of the text.
"""

from gspo_jax.plan.hlo.cost import HloCost
from gspo_jax.plan.hlo.walk import cost_of

__all__ = ("HloCost", "cost_of")
