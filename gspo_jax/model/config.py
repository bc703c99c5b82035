"""The sizes and switches of a decoder, and the named variants."""

import dataclasses

from gspo_jax.model.rotary import Llama3Scaling, RopeScaling, YarnScaling
from gspo_jax.runtime.errors import UserError, nearest
from gspo_jax.runtime.key import (
  POSITIVE,
  ZERO_OR_MORE,
  Choice,
  check,
  key,
)

DTYPES = ("float32", "bfloat16")
SCORES = ("softmax", "sigmoid")
_MAX_LAYERS = 4096  # of a model; the largest published ones have 126

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
class Layer:
  """What may differ between the layers of a model."""

  # A token attends to itself and the `window - 1` tokens before; None: to all.
  window: int | None = None
  experts: bool = True  # or an MLP


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder, dense or Mixture-of-Experts; the defaults are Qwen3's.

  Qwen3 is arXiv 2505.09388, sec. 2. `VARIANTS` has the fields of the other
  families: Qwen2 (arXiv 2412.15115), Llama 3 (2407.21783), Mixtral
  (2401.04088), OLMoE (2409.02060), GLM-4.5 (2508.06471), gpt-oss (2508.10925)
  and MiniMax-M2.
  """

  vocab_size: int  # rows of the embedding
  num_layers: int  # decoder blocks
  embed_dim: int  # width of the residual stream
  num_heads: int  # query heads
  num_kv_heads: int  # key and value heads; divides `num_heads`
  head_dim: int  # width of one head; even, for the rotary halves
  mlp_dim: int  # hidden width of the SwiGLU MLP, or of one expert
  # The layers are `first`, then `pattern` repeated. Without a pattern all
  # layers are alike: full attention, and experts if the model has any.
  first: tuple[Layer, ...] = ()
  pattern: tuple[Layer, ...] = ()
  dense_mlp_dim: int = 0  # hidden width of the MLP in layers without experts
  num_experts: int = 0  # 0 for a dense model
  experts_per_token: int = 0  # experts that each token is routed to
  shared_dim: int = 0  # hidden width of the expert of all tokens; 0: none
  shared_gate: bool = False  # a sigmoid weighs the output of this expert
  # An expert's score of a token: a softmax over all experts, or a sigmoid.
  scoring_func: str = "softmax"
  # Divide the scores of the chosen experts by their sum.
  norm_topk_prob: bool = True
  routed_scaling_factor: float = 1.0  # multiplies the routing weights
  # The experts are in `n_group` groups, and a token's experts are all in
  # `topk_group` of them (arXiv 2412.19437, sec. 2.1.2).
  n_group: int = 1
  topk_group: int = 1
  # A number for each expert is added to its score for the choice alone, not for
  # the weight. It balances loads in pre-training; RL leaves it as it is.
  choice_bias: bool = False
  router_bias: bool = False  # the router's logits have a bias
  expert_bias: bool = False  # both products of an expert have a bias
  # gpt-oss' experts: `(u + 1) g sigmoid(1.702 g)` of a gate `g`, at most this,
  # and an up `u` within plus and minus this. None: SwiGLU.
  swiglu_limit: float | None = None
  rope_theta: float = 1e6  # base of the rotary frequencies
  rotary_dim: int | None = None  # rotated columns of a head; None: all
  # A `rotary.Llama3Scaling`, a `rotary.YarnScaling`, or None.
  rope_scaling: RopeScaling | None = None
  attention_bias: bool = False  # queries, keys and values have a bias
  output_bias: bool = False  # the output of attention has a bias
  # Each head has a learned logit that takes part in the softmax over the keys
  # and has no value (arXiv 2309.17453).
  sinks: bool = False
  qk_norm: bool = True  # queries and keys have an RMSNorm
  # This norm is over all heads together, not per head.
  qk_norm_over_heads: bool = False
  norm_eps: float = 1e-6  # epsilon of every RMSNorm
  # An RMSNorm multiplies by its scale before it rounds to `dtype`, not after.
  norm_rounds_last: bool = False
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
    if not 0 < self.rotary_width <= self.head_dim or self.rotary_width % 2:
      raise UserError(
        f"model.rotary_dim={self.rotary_dim}: expected an even number up to"
        f" model.head_dim={self.head_dim}"
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
    self._check_layers()
    self._check_router()
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

  def _check_layers(self):
    if self.num_layers > _MAX_LAYERS:
      raise UserError(
        f"model.num_layers={self.num_layers}: expected at most {_MAX_LAYERS}"
      )
    pattern, first = len(self.pattern) or 1, len(self.first)
    if first > self.num_layers or (self.num_layers - first) % pattern:
      raise UserError(
        f"model.num_layers={self.num_layers}: expected {first} +"
        f" a multiple of {pattern}, for the layers are model.first and then"
        " model.pattern repeated"
      )
    has_experts = any(layer.experts for layer in self.layers)
    if has_experts != bool(self.num_experts):
      raise UserError(
        f"model.num_experts={self.num_experts}: expected"
        f" {'a number above 0' if has_experts else '0'}, for"
        f" {'some' if has_experts else 'none'} of the {self.num_layers} layers"
        " have experts"
      )
    for layer in self.layers:
      if layer.window is not None and layer.window < 1:
        raise UserError(
          f"window={layer.window} of a layer: expected at least 1"
        )

  def _check_router(self):
    E, n = self.num_experts, self.n_group
    if self.scoring_func not in SCORES:
      hint = nearest(self.scoring_func, SCORES)
      raise UserError(f"model.scoring_func={self.scoring_func!r}: {hint}")
    if n < 1 or E % n or (n > 1 and E // n < 2):
      raise UserError(
        f"model.n_group={n}: expected a divisor of model.num_experts={E}, with"
        " at least 2 experts a group"
      )
    if not 1 <= self.topk_group <= n or (
      E and self.experts_per_token > self.topk_group * (E // n)
    ):
      raise UserError(
        f"model.topk_group={self.topk_group}: expected 1 to model.n_group={n},"
        f" and room for model.experts_per_token={self.experts_per_token}"
      )

  @property
  def layers(self) -> tuple[Layer, ...]:
    return self.first + self.period * self.num_periods

  @property
  def period(self) -> tuple[Layer, ...]:
    """The layers that are repeated after `first`."""
    return self.pattern or (Layer(experts=self.num_experts > 0),)

  @property
  def num_periods(self) -> int:
    return (self.num_layers - len(self.first)) // len(self.period)

  def layers_with(self, module: str) -> tuple[int, ...]:
    """The numbers of the layers that have a module, such as "moe"."""
    return tuple(
      i for i, layer in enumerate(self.layers) if self.has(layer, module)
    )

  def has(self, layer: Layer, module: str) -> bool:
    if module == "shared":
      return layer.experts and self.shared_dim > 0
    if module in ("moe", "mlp"):
      return layer.experts == (module == "moe")
    return module in ("attention_norm", "attention", "mlp_norm")

  @property
  def num_moe_layers(self) -> int:
    return len(self.layers_with("moe"))

  @property
  def dense_dim(self) -> int:
    """The hidden width of the MLP in layers without experts."""
    return self.dense_mlp_dim or self.mlp_dim

  @property
  def rotary_width(self) -> int:
    return self.head_dim if self.rotary_dim is None else self.rotary_dim

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


def _glm(*sizes, first, **changes) -> ModelConfig:
  fields = {
    "vocab_size": 151_552,
    "first": (Layer(experts=False),) * first,
    "pattern": (Layer(),),
    "experts_per_token": 8,
    "scoring_func": "sigmoid",
    "choice_bias": True,
    "attention_bias": True,
    "rotary_dim": 64,
    "norm_eps": 1e-5,
  }
  return _qwen3(*sizes, **fields | changes)


def _minimax(*sizes, **changes) -> ModelConfig:
  fields = {
    "vocab_size": 200_064,
    "experts_per_token": 8,
    "scoring_func": "sigmoid",
    "choice_bias": True,
    "qk_norm_over_heads": True,
    "rotary_dim": 64,
    "rope_theta": 5e6,
  }
  return _qwen3(*sizes, **fields | changes)


def _gpt_oss(*sizes, window=128, **changes) -> ModelConfig:
  fields = {
    "vocab_size": 201_088,
    "head_dim": 64,
    "pattern": (Layer(window=window), Layer()),
    "experts_per_token": 4,
    "router_bias": True,
    "expert_bias": True,
    "swiglu_limit": 7.0,
    "rope_theta": 1.5e5,
    "rope_scaling": YarnScaling(32.0, 4096, truncate=False),
    "attention_bias": True,
    "output_bias": True,
    "sinks": True,
    "qk_norm": False,
    "norm_eps": 1e-5,
    "norm_rounds_last": True,
  }
  return _qwen3(*sizes, **fields | changes)


# As the tiny model, for trying a family on two cores.
_TINY_SIZES = {
  "vocab_size": 258,
  "head_dim": 16,
  "num_experts": 8,
  "experts_per_token": 2,
  "rope_theta": 1e4,
  "remat": "none",
}

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
  "qwen1.5-moe-a2.7b": _qwen2(
    *(24, 2048, 16, 16, 1408),
    num_experts=60,
    experts_per_token=4,
    norm_topk_prob=False,
    shared_dim=5632,
    shared_gate=True,
  ),
  "glm-4.5-air": _glm(
    *(46, 4096, 96, 8, 1408),
    first=1,
    dense_mlp_dim=10_944,
    num_experts=128,
    shared_dim=1408,
    qk_norm=False,
  ),
  # GLM-4.6 and 4.7 have the same sizes.
  "glm-4.5": _glm(
    *(92, 5120, 96, 8, 1536),
    first=3,
    dense_mlp_dim=12_288,
    num_experts=160,
    shared_dim=1536,
    routed_scaling_factor=2.5,
  ),
  "minimax-m2": _minimax(62, 3072, 48, 8, 1536, num_experts=256),
  "gpt-oss-20b": _gpt_oss(24, 2880, 64, 8, 2880, num_experts=32),
  "gpt-oss-120b": _gpt_oss(36, 2880, 64, 8, 2880, num_experts=128),
  "tiny-glm-4.5": _glm(
    *(3, 64, 4, 4, 64),
    first=1,
    dense_mlp_dim=128,
    shared_dim=64,
    rotary_dim=8,
    **_TINY_SIZES,
  ),
  "tiny-minimax-m2": _minimax(2, 64, 4, 2, 64, rotary_dim=8, **_TINY_SIZES),
  "tiny-gpt-oss": _gpt_oss(*(2, 64, 4, 2, 64), window=8, **_TINY_SIZES),
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
