"""The sizes and switches of a decoder, and the named variants."""

import dataclasses

from gspo_jax.model.rotary import Llama3Scaling, RopeScaling
from gspo_jax.runtime.errors import UserError, nearest
from gspo_jax.runtime.key import (
  POSITIVE,
  ZERO_OR_MORE,
  Choice,
  check,
  key,
)

DTYPES = ("float32", "bfloat16")

# Values that a rematerialised block may keep; each one kept saves a part of the
# second forward pass. The bytes are per token and layer, at 16 bits, with D
# model width, N query and K key-value heads of width H, k experts of width F,
# and x devices along `expert`.
KEPT = (
  "attention",  # attention's output, 2 N H
  "stream",  # the residual stream between attention and experts, 2 D
  "heads",  # queries, keys and values before their norms, 2 (N + 2 K) H
  "tokens",  # tokens gathered along `expert`, 2 x D
  "hidden",  # gates and ups of experts split over devices, 1.25 * 4 k F
  "weights",  # experts gathered along `fsdp`: not per token
)


TARGETS = ("attention", "mlp", "all-linear")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Which weights have adapters, and their size.

  Each expert has an A and a B. Gate and up of an expert are one matrix here, so
  they share A.
  """

  rank: int = key(
    0,
    "columns of A and rows of B; 0: no adapters, all weights are trained",
    ZERO_OR_MORE,
  )
  alpha: float = key(
    32.0, "alpha / rank multiplies what an adapter adds", POSITIVE
  )
  targets: str = key(
    "all-linear",
    '"attention" (q, k, v and o), "mlp" (gate, up and down of the MLP or of '
    'every expert), "all-linear": both',
    Choice(TARGETS),
  )
  checkpoint: str = key(
    "",
    'a PEFT folder with the first adapters; "": new ones, which change nothing '
    "yet",
  )

  def __post_init__(self):
    check(self, "model.lora")
    if self.checkpoint and not self.rank:
      raise UserError(
        f"model.lora.checkpoint={self.checkpoint!r}: expected '' with "
        "model.lora.rank=0, where there are no adapters"
      )

  @property
  def scale(self) -> float:
    """The factor of A B."""
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A Qwen3 decoder, dense or Mixture-of-Experts (arXiv 2505.09388, sec. 2).

  With `attention_bias` and without `qk_norm` it is Qwen2 (arXiv 2412.15115),
  with neither it is Llama 3 (arXiv 2407.21783), or with experts Mixtral (arXiv
  2401.04088). With `qk_norm_over_heads` it is OLMoE (arXiv 2409.02060).
  """

  vocab_size: int  # rows of the embedding
  num_layers: int  # decoder blocks
  embed_dim: int  # width of the residual stream
  num_heads: int  # query heads
  num_kv_heads: int  # key and value heads; divides `num_heads`
  head_dim: int  # width of one head; even, for the rotary halves
  mlp_dim: int  # hidden width of the SwiGLU MLP, or of one expert
  num_experts: int = 0  # experts of every block; 0 for a dense model
  experts_per_token: int = 0  # experts that each token is routed to
  # Divide the routing weights of these experts by their sum.
  norm_topk_prob: bool = True
  expert_bias: bool = False  # both projections of an expert have a bias
  # Experts use the clamped activation of gpt-oss, with this limit.
  swiglu_limit: float | None = None
  rope_theta: float = 1e6  # base of the rotary frequencies
  # A `rotary.Llama3Scaling`, a `rotary.YarnScaling`, or None.
  rope_scaling: RopeScaling | None = None
  attention_bias: bool = False  # queries, keys and values have a bias
  qk_norm: bool = True  # queries and keys have an RMSNorm
  # This norm is over all heads together, not per head.
  qk_norm_over_heads: bool = False
  norm_eps: float = 1e-6  # epsilon of every RMSNorm
  tie_embeddings: bool = False  # the embedding is also the output matrix
  # Of activations and matrix products; parameters, softmaxes and vocabulary
  # logits are always float32.
  dtype: str = "bfloat16"
  # What each block stores for the backward pass, which computes the rest again:
  # names of `KEPT` with commas between, "full" for nothing, "none" for all.
  remat: str = "attention,stream"
  # Layers in one step of the scan over layers; `num_layers`: no scan, and
  # nothing that the backward pass needs is stacked. None: `num_layers` on a CPU
  # with at most 8 layers, else 1, which compiles fastest.
  unroll: int | None = None
  # The low-rank adapters; None: all weights are trained.
  lora: LoraConfig | None = None

  def __post_init__(self):
    heads, kv_heads = self.num_heads, self.num_kv_heads
    k, E = self.experts_per_token, self.num_experts
    if heads % kv_heads:
      raise UserError(
        f"model.num_heads={heads}: expected a multiple of"
        f" model.num_kv_heads={kv_heads}"
      )
    if self.head_dim % 2:
      raise UserError(
        f"model.head_dim={self.head_dim}: expected an even number, because"
        " rotary embeddings split it in halves"
      )
    scaling = self.rope_scaling
    if scaling is not None and not isinstance(scaling, RopeScaling):
      raise UserError(
        f"model.rope_scaling={scaling}: expected None, a"
        " gspo_jax.model.Llama3Scaling or a gspo_jax.model.YarnScaling"
      )
    if self.qk_norm_over_heads and not self.qk_norm:
      raise UserError(
        "model.qk_norm_over_heads=True: expected model.qk_norm=True as well"
      )
    if E and not 1 <= k <= E:
      raise UserError(
        f"model.experts_per_token={k}: expected 1 to model.num_experts={E}"
      )
    if self.dtype not in DTYPES:
      raise UserError(
        f"model.dtype={self.dtype!r}: {nearest(self.dtype, DTYPES)}"
      )
    if self.lora is not None and not self.lora.rank:
      raise UserError("model.lora.rank=0: expected lora=None")
    for name in self.kept or ():
      if name not in KEPT:
        hint = nearest(name, ("none", "full", *KEPT))
        raise UserError(f"model.remat={name!r}: {hint}")

  @property
  def kept(self) -> tuple[str, ...] | None:
    """The values that `remat` stores; None: all values."""
    if self.remat in ("none", "full"):
      return None if self.remat == "none" else ()
    return tuple(name.strip() for name in self.remat.split(","))


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
  """The policy that a run trains; `sizes` overrides fields of `ModelConfig`."""

  checkpoint: str = key(
    "",
    "a Hugging Face folder: the first weights, the sizes and the tokenizer",
  )
  variant: str = key(
    "tiny", "without a checkpoint: a name in gspo_jax/model/config.py"
  )
  dtype: str = key(
    "bfloat16", "of activations; parameters are float32", Choice(DTYPES)
  )
  remat: str = key(
    "attention,stream",
    'what a block stores for the backward pass: "none": no rematerialisation, '
    'it stores all; "full": nothing, it computes all again; else names of KEPT '
    "in gspo_jax/model/config.py with commas between, and it computes the rest "
    "again",
  )
  lora: LoraConfig = key(
    LoraConfig(),
    "low-rank adapters: the weights stay as they are, in `model.dtype`, and "
    "only the adapters are trained, in float32. The reference policy is the "
    "weights without adapters.",
  )
  sizes: tuple[tuple[str, object], ...] = ()

  def __post_init__(self):
    check(self, "model")


# The embedded default (see tasks/chain.py): it learns in minutes on two cores.
# Its vocabulary is the 256 bytes, padding and end of text.
_TINY = ModelConfig(
  vocab_size=258,
  num_layers=2,
  embed_dim=64,
  num_heads=4,
  num_kv_heads=4,
  head_dim=16,
  mlp_dim=64,
  num_experts=8,
  experts_per_token=2,
  rope_theta=1e4,
  remat="none",
)

# For text on two cores: configs/gsm8k_small.py.
_SMALL = dataclasses.replace(
  _TINY,
  vocab_size=2048,
  num_layers=4,
  embed_dim=128,
  num_kv_heads=2,
  head_dim=32,
  mlp_dim=128,
  num_experts=4,
  tie_embeddings=True,
)


def _qwen3(layers, width, heads, kv_heads, mlp, **changes) -> ModelConfig:
  sizes = {"vocab_size": 151_936, "head_dim": 128} | changes
  return ModelConfig(
    num_layers=layers,
    embed_dim=width,
    num_heads=heads,
    num_kv_heads=kv_heads,
    mlp_dim=mlp,
    **sizes,
  )


def _qwen2(*sizes, **changes) -> ModelConfig:
  return _qwen3(*sizes, attention_bias=True, qk_norm=False, **changes)


def _llama(*sizes, **changes) -> ModelConfig:
  return _qwen3(*sizes, qk_norm=False, norm_eps=1e-5, **changes)


def _llama3(*sizes, rope_factor, **changes) -> ModelConfig:
  return _llama(
    *sizes,
    vocab_size=128_256,
    rope_theta=5e5,
    rope_scaling=Llama3Scaling(rope_factor, 1.0, 4.0, 8192),
    **changes,
  )


def _smollm2(*sizes, rope_theta) -> ModelConfig:
  return _llama(
    *sizes,
    vocab_size=49_152,
    head_dim=64,
    rope_theta=rope_theta,
    tie_embeddings=True,
  )


_QWEN3_30B = _qwen3(48, 2048, 32, 4, 768, num_experts=128, experts_per_token=8)
_QWEN3_235B = _qwen3(
  94, 4096, 64, 4, 1536, num_experts=128, experts_per_token=8
)

# Sizes are from config.json of each published checkpoint. Layers, heads,
# experts and tying of Qwen3 are also in tables 1 and 2 of arXiv 2505.09388.
VARIANTS = {
  "tiny": _TINY,
  "small": _SMALL,
  "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tie_embeddings=True),
  "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tie_embeddings=True),
  "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tie_embeddings=True),
  "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
  "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
  "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
  "qwen3-30b-a3b": _QWEN3_30B,
  "qwen3-30b-a3b-2507": dataclasses.replace(_QWEN3_30B, rope_theta=1e7),
  "qwen3-235b-a22b": _QWEN3_235B,
  "qwen3-235b-a22b-2507": dataclasses.replace(_QWEN3_235B, rope_theta=5e6),
  "qwen3-coder-30b-a3b": dataclasses.replace(_QWEN3_30B, rope_theta=1e7),
  "qwen3-coder-480b-a35b": _qwen3(
    *(62, 6144, 96, 8, 2560),
    num_experts=160,
    experts_per_token=8,
    rope_theta=1e7,
  ),
  "qwen2.5-0.5b": _qwen2(
    24, 896, 14, 2, 4864, head_dim=64, tie_embeddings=True
  ),
  "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, tie_embeddings=True),
  "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, vocab_size=152_064),
  "llama3.2-1b": _llama3(
    *(16, 2048, 32, 8, 8192), rope_factor=32.0, head_dim=64, tie_embeddings=True
  ),
  "llama3.1-8b": _llama3(32, 4096, 32, 8, 14336, rope_factor=8.0),
  "smollm2-135m": _smollm2(30, 576, 9, 3, 1536, rope_theta=1e5),
  "smollm2-360m": _smollm2(32, 960, 15, 5, 2560, rope_theta=1e5),
  "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, rope_theta=1.3e5),
  "olmoe-1b-7b": _qwen3(
    *(16, 2048, 16, 16, 1024),
    vocab_size=50_304,
    num_experts=64,
    experts_per_token=8,
    norm_topk_prob=False,
    rope_theta=1e4,
    qk_norm_over_heads=True,
    norm_eps=1e-5,
  ),
  "mixtral-8x7b": _llama(
    *(32, 4096, 32, 8, 14336),
    vocab_size=32_000,
    num_experts=8,
    experts_per_token=2,
  ),
}


def variant(name: str, **changes) -> ModelConfig:
  """The named variant with some fields changed.

  Raises:
    UserError: an unknown name or field, or an invalid value.
  """
  if name not in VARIANTS:
    raise UserError(f"model.variant={name!r}: {nearest(name, VARIANTS)}")
  return changed(VARIANTS[name], **changes)


def changed(cfg: ModelConfig, **changes) -> ModelConfig:
  """`cfg` with some fields changed; raises UserError as `variant` does."""
  fields = {f.name for f in dataclasses.fields(ModelConfig)}
  for name in changes:
    if name not in fields:
      raise UserError(f"model.{name}: unknown, {nearest(name, fields)}")
  return dataclasses.replace(cfg, **changes)
