"""What a config says, as the frozen dataclasses that the program is made of.

ConfigDict ends here and in program.py.
"""

import dataclasses
import functools

from ml_collections import ConfigDict

from gspo_jax import losses, model
from gspo_jax.data import prompt_batch, tokenizers
from gspo_jax.data.tokenizers import base
from gspo_jax.learner import critic, objective, optimizer, train_step
from gspo_jax.learner.cold_start import cross_entropy
from gspo_jax.learner.credit import CreditConfig
from gspo_jax.learner.train_batch import TrainBatchFields
from gspo_jax.model import hf
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.paging import ContinuousBatchingConfig
from gspo_jax.sampler.samples import SamplerConfig

OBJECTIVES = {
  "gspo": losses.gspo_loss,
  "gspo_token": losses.gspo_token_loss,
  "grpo": losses.grpo_loss,
  "dr_grpo": losses.dr_grpo_loss,
  "dapo": losses.dapo_loss,
  "ppo": losses.ppo_loss,
  "gmpo": losses.gmpo_loss,
  # losses.rspo_loss, its factor made of `router_shift_floor` as for any other
  "rspo": losses.gmpo_loss,
  "cispo": losses.cispo_loss,
  "sapo": losses.sapo_loss,
}
_NUMBERS = ("clip_low", "clip_high", "cap", "tau_positive", "tau_negative")


def model_config(config: ConfigDict) -> model.ModelConfig:
  """The policy a config names, or that of its Hugging Face folder."""
  changes = dict(config.model)
  name, folder = changes.pop("variant"), changes.pop("checkpoint")
  if folder:
    return hf.config_from_hf(folder, **changes)
  return model.variant(name, **changes)


def load_tokenizer(config: ConfigDict) -> base.Tokenizer:
  """That of a config, else of its Hugging Face folder, else bytes."""
  return tokenizers.load(
    config.data.tokenizer or config.model.checkpoint or "bytes"
  )


def require_fit(texts, cfg):
  if texts.vocab_size > cfg.vocab_size:
    raise UserError(
      f"the tokenizer has {texts.vocab_size} tokens and the model room for "
      f"{cfg.vocab_size}: expected data.tokenizer and the model to be a pair"
    )


def sampler_config(config: ConfigDict, texts: base.Tokenizer) -> SamplerConfig:
  """How a config draws rollouts."""
  return SamplerConfig(
    stop_ids=texts.stop_ids,
    pad_id=texts.pad_id,
    record_routing=config.objective.replay == "r3",
    **config.sampler,
  )


def paging(config: ConfigDict) -> ContinuousBatchingConfig | None:
  """The slots and pages of rollouts; None: all answers decode together."""
  if not config.continuous_batching.slots:
    return None
  return ContinuousBatchingConfig(**config.paging)


def prompting(config, texts) -> prompt_batch.PromptConfig:
  c = config.data
  return prompt_batch.PromptConfig(
    tokenizer=texts,
    width=c.max_prompt_length,
    system=c.system_prompt,
    instruction=c.instruction,
    too_long=c.too_long,
  )


def numbers(config: ConfigDict) -> dict[str, float]:
  """The numbers of the method: the config's, or its own where that says -1."""
  name = config.objective.name
  own, found = OBJECTIVES[name].__kwdefaults__, {}
  for key in _NUMBERS:
    asked = config.objective[key]
    if key in own:
      found[key] = own[key] if asked == -1 else asked
    elif asked != -1:
      raise UserError(
        f"objective.{key}={asked}: expected -1, since objective.name={name!r} "
        f"has only {', '.join(k for k in _NUMBERS if k in own)}"
      )
  return found


def objective_of(config) -> objective.Objective:
  c = config.objective
  method, _, unit = c.mismatch.partition("_")
  floor = c.router_shift_floor
  if floor == -1:
    floor = 0.8 if c.name == "rspo" else 0.0  # arXiv 2510.23027v2
  return objective.Objective(
    method=functools.partial(OBJECTIVES[c.name], **numbers(config)),
    dual_clip=c.dual_clip or None,
    kl_coef=0.0 if c.kl_estimator == "k1" else c.kl_coef,
    kl_estimator=c.kl_estimator,
    entropy_coef=c.entropy_coef,
    mismatch=objective.MismatchCorrection(
      method, unit, c.mismatch_cap, c.mismatch_floor
    )
    if unit
    else None,
    shift_floor=floor or None,
    replay=c.replay,
    sampler_logps=c.old_logps == "sampler",
    instruments=config.log.instruments,
  )


def fields(config: ConfigDict, cfg: model.ModelConfig) -> TrainBatchFields:
  """What an update reads of a rollout."""
  chosen, c = objective_of(config), config.objective
  moves = chosen.instruments or chosen.shift_floor is not None
  return TrainBatchFields(
    sampler_logps=chosen.sampler_logps,
    experts=cfg.num_experts > 0 and (moves or c.replay == "r2"),
    router_logps=cfg.num_experts > 0 and moves,
    reference=c.kl_coef > 0,
    critic=c.name == "ppo",
  )


def scores(config: ConfigDict, cfg: model.ModelConfig) -> bool:
  """Whether the old policy is asked before an update.

  Not where the only minibatch, or the sampler, says it all. Metrics of the old
  policy (`mismatch/*`, `policy/entropy`, `moe/*`) are then of the first
  minibatch alone.
  """
  wanted = fields(config, cfg)
  asked = not wanted.sampler_logps or wanted.experts
  several = config.learner.minibatches > 1
  return _scores_all(config) or (several and asked)


def _scores_all(config) -> bool:
  """Whether rewards are made of old log-probs, so that no row may lack them."""
  c = config.objective
  in_reward = c.kl_coef > 0 and c.kl_estimator == "k1"
  return in_reward and c.old_logps == "recompute"


def credit_of(config) -> CreditConfig:
  c = config.objective
  with_critic = c.name == "ppo"
  return CreditConfig(
    group_size=config.rollout.group_size,
    normalize_std=c.name != "dr_grpo",
    kl_coef=c.kl_coef if c.kl_estimator == "k1" else 0.0,
    zero_truncated=c.zero_truncated,
    discount=config.critic.discount,
    trace_decay=config.critic.trace_decay if with_critic else None,
  )


def require_experts(config, cfg):
  """UserError where a dense model is asked for what experts have."""
  if cfg.num_experts:
    return
  for key, off in (("replay", ("none",)), ("router_shift_floor", (-1, 0))):
    if (value := config.objective[key]) not in off:
      raise UserError(
        f"objective.{key}={value!r}: the model is dense, it routes nothing"
      )
  if config.objective.name == "rspo":
    raise UserError(
      "objective.name='rspo' weighs tokens by how far the router moved, and "
      "the model is dense; without a router it is 'gmpo'"
    )


def optim_config(config: ConfigDict) -> optimizer.OptimConfig:
  total = config.num_steps * config.learner.minibatches
  return optimizer.OptimConfig(total_steps=max(total, 1), **config.optim)


def learners(config, cfg):
  """How the policy learns, the critic (or None), and the cold start."""
  rl = train_step.Learner(
    loss=functools.partial(
      objective.policy_loss,
      cfg=cfg,
      objective=objective_of(config),
      temperature=config.sampler.temperature,
    ),
    optimizer=optimizer.optimizer(optim_config(config)),
    minibatches=config.learner.minibatches,
    micro_batch_size=config.learner.micro_batch_size,
    group=config.rollout.group_size,
    has_old_logps=scores(config, cfg)
    or config.objective.old_logps == "sampler",
    score_every_minibatch=_scores_all(config),
  )
  judge, own = None, config.critic
  if config.objective.name == "ppo":
    schedule = dataclasses.replace(
      optim_config(config),
      learning_rate=own.learning_rate,
      warmup_steps=own.warmup_steps,
    )
    judge = rl._replace(
      loss=functools.partial(critic.loss, cfg=cfg, clip=own.clip),
      optimizer=optimizer.optimizer(schedule),
    )
  return rl, judge, _imitation(config, cfg)


def _imitation(config, cfg):
  cold = config.cold_start
  schedule = optimizer.OptimConfig(
    learning_rate=cold.learning_rate,
    warmup_steps=cold.warmup_steps,
    total_steps=max(cold.steps, 1),
    decay="cosine",
    b2=0.98,
    weight_decay=0.01,
  )
  return train_step.Learner(
    loss=functools.partial(cross_entropy, cfg=cfg),
    optimizer=optimizer.optimizer(schedule),
    minibatches=1,
    micro_batch_size=min(config.learner.micro_batch_size, cold.batch),
    group=1,
  )
