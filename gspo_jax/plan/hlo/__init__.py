"""What a compiled program costs on a device, read from the compiler's dump.

`plan` calls `cost_of` alone. All other code depends on the format of the text.
"""

from gspo_jax.plan.hlo.cost import HloCost
from gspo_jax.plan.hlo.walk import cost_of

__all__ = ("HloCost", "cost_of")
