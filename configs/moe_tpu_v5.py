"""configs/moe_tpu.py by its first name: Qwen3-30B-A3B on v5p:4x4x4.

  python -m gspo_jax.plan --config=configs/moe_tpu_v5.py --topology=v5p:4x4x4
  python -m gspo_jax.main --config=configs/moe_tpu_v5.py --workdir=gs://...

Every argument of configs/moe_tpu.py works here.
"""

from gspo_jax.configs import moe_tpu

get_config = moe_tpu.get_config
