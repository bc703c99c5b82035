"""The named models: published ones, and small ones for two cores.

variants.json has the config.json of each, as `hf` reads it: the keys that the
family needs or whose values are not its defaults. Published sizes are from the
checkpoints' own files; layers, heads, experts and tying of Qwen3 are also in
tables 1 and 2 of arXiv 2505.09388. GLM-4.6 and 4.7 have the sizes of GLM-4.5,
and DeepSeek-R1 has the sizes of DeepSeek-V3. `kimi-k2` is
Kimi-K2-Instruct-0905.

`tiny` is the embedded default (see tasks/chain.py): it learns in minutes on two
cores. Its vocabulary is the 256 bytes, padding and end of text. `small` is for
text on two cores (configs/gsm8k_small.py), `tiny-FAMILY` for trying a family.
"""

from pathlib import Path

from gspo_jax.model.config import ModelConfig, changed
from gspo_jax.model.hf.config import model_config
from gspo_jax.record import json_file
from gspo_jax.runtime.key import Choice

_FILE = Path(__file__).with_suffix(".json")


def _variant(name: str, raw: dict) -> ModelConfig:
  cfg = model_config(_FILE, raw)
  if not name.startswith(("tiny", "small")):
    return cfg
  return changed(cfg, remat="none")  # two cores have the memory


VARIANTS = {
  name: _variant(name, raw) for name, raw in json_file.read(_FILE).items()
}


def variant(name: str, **changes) -> ModelConfig:
  """The named variant with some fields changed.

  Raises:
    UserError: an unknown name or field, or an invalid value.
  """
  Choice(tuple(VARIANTS)).check("model.variant", name)
  return changed(VARIANTS[name], **changes)
