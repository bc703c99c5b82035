"""The sizes and switches of a decoder."""

import dataclasses
from collections.abc import Iterator

from gspo_jax.model.rotary import RopeScaling
from gspo_jax.runtime.errors import UserError, nearest
from gspo_jax.runtime.key import (
  POSITIVE,
  ZERO_OR_MORE,
  Choice,
  check,
  key,
)

DTYPES = ("float32", "bfloat16")
# How a layer mixes tokens: attention to keys and values, multi-head latent
# attention (mla.py), or a gated DeltaNet (delta_net.py). Each is a module.
MIXERS = ("attention", "mla", "delta_net")
_MAX_LAYERS = 4096  # of a model; the largest published ones have 126

# Values that a rematerialised block may keep; each one kept saves a part of the
# second forward pass. The bytes are per token and layer, at 16 bits, with D
# model width, N query and K key-value heads of width H, k experts of width F,
# and x devices along `expert`. They are of attention: the heads of a gated
# DeltaNet and of MLA have other widths.
KEPT = (
  "attention",  # attention's output, or a DeltaNet's, 2 N H
  "stream",  # the residual stream between attention and experts, 2 D
  "heads",  # queries, keys and values before their norms, 2 (N + 2 K) H
  "tokens",  # tokens gathered along `expert`, 2 x D
  "hidden",  # gates and ups of experts split over devices, 1.25 * 4 k F
  "weights",  # experts gathered along `fsdp`: not per token
)


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
    Choice(("attention", "mlp", "all-linear")),
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
  mixer: str = "attention"  # one of `MIXERS`
  rotary: bool = True  # attention rotates queries and keys


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder, dense or Mixture-of-Experts; the defaults are Qwen3's.

  Qwen3 is arXiv 2505.09388, sec. 2. `variants.json` has the sizes of the other
  families: Qwen2 (arXiv 2412.15115), Llama 3 (2407.21783), Mixtral
  (2401.04088), OLMoE (2409.02060), GLM-4.5 (2508.06471), gpt-oss (2508.10925),
  DeepSeek-V3 (2412.19437), Moonlight (2502.16982), MiniMax-M2, Qwen3-Next and
  Qwen3.5.
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
  # A sigmoid of each query head's gate multiplies its output.
  output_gate: bool = False
  # MLA (arXiv 2412.19437, sec. 2.1.1). The last `rotary_dim` columns of a query
  # or key are rotated; all keys of a token have them in common.
  q_lora_rank: int = 0  # width of the queries' latent; 0: there is none
  kv_lora_rank: int = 0  # width of the latent of keys and values
  v_head_dim: int = 0  # width of one value head; 0: as `head_dim`
  # Rotary pairs are neighbours, (0, 1), (2, 3), and not (0, H / 2).
  rope_interleave: bool = False
  # Gated DeltaNet (arXiv 2412.06464): heads, widths, tokens of a convolution.
  linear_num_key_heads: int = 0
  linear_num_value_heads: int = 0
  linear_key_head_dim: int = 0
  linear_value_head_dim: int = 0
  linear_conv_kernel_dim: int = 4
  # Queries, keys, values and gates are one projection, the two numbers of a
  # head another, as in Qwen3-Next. In Qwen3.5 gates and numbers are apart.
  linear_fused: bool = False
  qk_norm: bool = True  # queries and keys have an RMSNorm
  # This norm is over all heads together, not per head.
  qk_norm_over_heads: bool = False
  norm_eps: float = 1e-6  # epsilon of every RMSNorm
  # An RMSNorm multiplies by its scale before it rounds to `dtype`, not after.
  norm_rounds_last: bool = False
  norm_plus_one: bool = False  # an RMSNorm multiplies by 1 + its scale
  tie_embeddings: bool = False  # the embedding is also the output matrix
  # A reward model: in place of the logits it has one score, see `scores`.
  classifier: bool = False
  # Of activations and matrix products; parameters, softmaxes and vocabulary
  # logits are always float32.
  dtype: str = "bfloat16"
  # Operands of the product that gives the vocabulary logits are float32, too.
  float32_head: bool = False
  float32_router: bool = False  # those of the routers' logits are
  # A token's log-prob has the same bits in sampler and trainer, see exact.py.
  exact: bool = False
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
    for field, is_right, expected in self._rules():
      if not is_right:
        value = getattr(self, field)
        raise UserError(f"model.{field}={value}: expected {expected}")
    for layer in self.layers:
      if layer.window is not None and layer.window < 1:
        raise UserError(
          f"window={layer.window} of a layer: expected at least 1"
        )
      if layer.mixer not in MIXERS:
        hint = nearest(layer.mixer, MIXERS)
        raise UserError(f"mixer={layer.mixer!r} of a layer: {hint}")
    scores = Choice(("softmax", "sigmoid"))
    scores.check("model.scoring_func", self.scoring_func)
    Choice(DTYPES).check("model.dtype", self.dtype)
    if self.lora is not None and not self.lora.rank:
      raise UserError("model.lora.rank=0: expected lora=None")
    for name in self.kept or ():
      Choice(("none", "full", *KEPT)).check("model.remat", name)

  def _rules(self) -> Iterator[tuple[str, bool, str]]:
    """Fields, whether the value is right, and what is expected.

    Those of layers assume that the ones before are right.
    """
    N, K, H = self.num_heads, self.num_kv_heads, self.head_dim
    yield "num_heads", N % K == 0, f"a multiple of model.num_kv_heads={K}"
    halves = "an even number, because rotary embeddings split it in halves"
    yield "head_dim", H % 2 == 0, halves
    width, even = self.rotary_width, f"an even number up to model.head_dim={H}"
    yield "rotary_dim", 0 < width <= H and width % 2 == 0, even
    yield (
      "rope_scaling",
      isinstance(self.rope_scaling, RopeScaling | None),
      "None, a gspo_jax.model.Llama3Scaling or a gspo_jax.model.YarnScaling",
    )
    is_whole = self.qk_norm or not self.qk_norm_over_heads
    yield "qk_norm_over_heads", is_whole, "model.qk_norm=True as well"
    k, E = self.experts_per_token, self.num_experts
    is_share = not E or 1 <= k <= E
    yield "experts_per_token", is_share, f"1 to model.num_experts={E}"
    most, first = _MAX_LAYERS, len(self.first)
    yield "num_layers", self.num_layers <= most, f"at most {most}"
    pattern, rest = len(self.period), self.num_layers - first
    yield (
      "num_layers",
      rest >= 0 and rest % pattern == 0,
      f"{first} + a multiple of {pattern}, for the layers are model.first and"
      " then model.pattern repeated",
    )
    some = any(layer.experts for layer in self.layers)
    yield (
      "num_experts",
      some == bool(self.num_experts),
      f"{'a number above 0' if some else '0'}, for {'some' if some else 'none'}"
      f" of the {self.num_layers} layers have experts",
    )
    yield from self._rules_of_groups()
    yield from self._rules_of_mixers({layer.mixer for layer in self.layers})

  def _rules_of_mixers(self, mixers) -> Iterator[tuple[str, bool, str]]:
    if "mla" in mixers:
      end = "with layers of mixer='mla'"
      N = self.num_heads
      yield "kv_lora_rank", self.kv_lora_rank >= 1, f"at least 1 {end}"
      same = self.num_kv_heads == N
      yield "num_kv_heads", same, f"model.num_heads={N} {end}"
    if "delta_net" in mixers:
      least = "at least 1 with layers of mixer='delta_net'"
      for end in ("num_key_heads", "key_head_dim", "value_head_dim"):
        yield f"linear_{end}", getattr(self, f"linear_{end}") >= 1, least
      M, G = self.linear_num_value_heads, self.linear_num_key_heads
      multiple = f"a multiple of model.linear_num_key_heads={G}"
      yield "linear_num_value_heads", M >= 1 and M % G == 0, multiple
      width = self.linear_conv_kernel_dim
      yield "linear_conv_kernel_dim", width >= 2, "at least 2"

  def _rules_of_groups(self) -> Iterator[tuple[str, bool, str]]:
    k, E, n = self.experts_per_token, self.num_experts, self.n_group
    yield (
      "n_group",
      n >= 1 and E % n == 0 and (n == 1 or E // n >= 2),
      f"a divisor of model.num_experts={E}, with at least 2 experts a group",
    )
    groups = self.topk_group
    yield (
      "topk_group",
      1 <= groups <= n and (not E or k <= groups * (E // n)),
      f"1 to model.n_group={n}, and room for model.experts_per_token={k}",
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
    if module in MIXERS:
      return layer.mixer == module
    return module in ("attention_norm", "mlp_norm")

  @property
  def num_moe_layers(self) -> int:
    return len(self.layers_with("moe"))

  @property
  def dense_dim(self) -> int:
    """The hidden width of the MLP in layers without experts."""
    return self.dense_mlp_dim or self.mlp_dim

  @property
  def value_dim(self) -> int:
    """The width of one value head of attention."""
    return self.v_head_dim or self.head_dim

  @property
  def rotary_width(self) -> int:
    return self.head_dim if self.rotary_dim is None else self.rotary_dim

  @property
  def head_dtype(self) -> str:
    """The dtype of the operands of the product that gives the logits."""
    return "float32" if self.float32_head else self.dtype

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
    "tiny", "without a checkpoint: a name in gspo_jax/model/variants.json"
  )
  dtype: str = key(
    "bfloat16", "of activations; parameters are float32", Choice(DTYPES)
  )
  float32_head: bool = key(
    False,
    "multiply hidden states by the output matrix in float32, in training and "
    "sampling, not in `dtype`; logits are float32 in any case",
  )
  float32_router: bool = key(
    False, "multiply hidden states by the routers in float32, as well"
  )
  exact: bool = key(
    False,
    "the log-probs of sampled responses equal the trainer's in every bit: the "
    "same arithmetic in the same order in both",
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


def changed(cfg: ModelConfig, **changes) -> ModelConfig:
  """`cfg` with some fields changed; raises UserError as `variant` does."""
  fields = {f.name for f in dataclasses.fields(ModelConfig)}
  for name in changes:
    if name not in fields:
      raise UserError(f"model.{name}: unknown, {nearest(name, fields)}")
  return dataclasses.replace(cfg, **changes)
