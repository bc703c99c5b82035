"""What a config refuses: each error names the key, the value and a remedy."""

import json

import jax
import pytest
from ml_collections import ConfigDict

from gspo_jax.program import rules
from gspo_jax.program.config import all_keys, parse, parse_model
from gspo_jax.program.functions import build_program
from gspo_jax.program.rules import check_training
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError


def build(keys):
  """What `train` does with a config before any work, on one device."""
  parsed = parse(keys)
  sizes = keys.mesh.to_dict()
  build_program(parsed, sharding.make_mesh(jax.devices()[:1], **sizes))


def set_keys(keys, overrides):
  """Sets each `section.key=value`, with the value typed as on a command."""
  for override in overrides:
    key, _, text = override.partition("=")
    value = keys
    for part in key.split("."):
      value = value[part]
    many = lambda text: () if text == "()" else tuple(text.split(","))
    kinds = {bool: lambda text: text == "True", tuple: many}
    value = kinds.get(type(value), type(value))(text)
    keys.update_from_flattened_dict({key: value})


def refused(keys, overrides, words):
  set_keys(keys, overrides.split())
  with pytest.raises(UserError, match=words) as error:
    build(keys)
  text = str(error.value)
  assert "\n" not in text
  assert len(text) < 400


# The range of one key.

ESTIMATOR = "objective.advantage_estimator"


@pytest.mark.parametrize(
  ("override", "words"),
  [
    ("objective.name=gpso", "objective.name='gpso': did you mean 'gspo'"),
    ("model.variant=qwen3-8", "model.variant='qwen3-8': did you mean 'qwen3-"),
    ("model.dtype=float16", "did you mean 'bfloat16'"),
    ("rollout.group_size=1", "rollout.group_size=1: expected at least 2"),
    ("sampler.temperature=0", "sampler.temperature=0.0: expected more than 0"),
    ("sampler.stop=", "sampler.stop=.*expected strings that are not"),
    ("data.prompts=6", "data.prompts = 6 is not divisible by learner.minib"),
    ("learner.minibatches=3", "= 4 is not divisible by .*nearest divisor is 2"),
    ("learner.micro_batch_size=3", "= 4 is not divisible by .*_size = 3"),
    ("cold_start.batch=6", "cold_start.batch = 6 is not divisible by learner"),
    ("eval.samples=0", "eval.samples=0: expected at least 1"),
    ("optim.name=adam", "optim.name='adam': did you mean 'adamw'"),
    ("optim.decay=cosin", "optim.decay='cosin': did you mean 'cosine'"),
    ("cold_start.gate=7", "cold_start.gate=7.0: expected 0 to 1"),
    ("checkpoint.every=0", "checkpoint.every=0"),
    ("data.prompts=0", "data.prompts=0: expected at least 1"),
    ("log.samples=-1", "log.samples=-1"),
    ("optim.learning_rate=inf", "optim.learning_rate=inf"),
    ("optim.learning_rate=nan", "optim.learning_rate=nan"),
    ("model.remat=attention,streem", "remat='streem': did you mean 'stream'"),
    ("seed=99999999999999999999", "seed=9+: expected 0 or more, under"),
    ("data.too_long=cut", "data.too_long='cut': choose one of drop, error"),
    ("data.instruction=Go", "data.instruction='Go': expected {problem} in it"),
    ("reward.max_failed=1.5", "reward.max_failed=1.5: expected 0 to 1"),
    ("model.checkpoint=nope", "model.checkpoint='nope': no such folder"),
    ("model.checkpoint=Qwen/Qwen3-8B", "`hf download Qwen/Qwen3-8B --local-d"),
    ("data.tokenizer=Qwen/Qwen3-8B", "`hf download Qwen/Qwen3-8B --local-d"),
    ("mesh.data=3", "does not multiply to the 1 devices"),
    ("mesh.tensor=-1", "does not multiply to the 1 devices"),
    # A number of the objective.
    ("objective.mismatch=tis", "objective.mismatch='tis': .* tis_token"),
    ("objective.name=grpo:dual_clip=0.5", "dual_clip=0.5: expected more than"),
    ("objective.name=gspo:clip_low=-1", "'gspo:clip_low=-1': clip_low=-1: exp"),
    ("objective.name=ppo:critic_discount=2", "discount=2: expected 0 to 1"),
    ("objective.mismatch=mis_token:floor=1", "floor=1: expected 0 or more, u"),
    ("objective.mismatch=tis_token:floor=.1", "no argument 'floor'"),
    ("objective.name=cispo:cap=1e999", "cap=inf: expected more than 0"),
    ("objective.name=sapo:clip_high=.2", "'sapo' has no argument 'clip_high'"),
    (f"{ESTIMATOR}=rlo", f"{ESTIMATOR}='rlo': did you mean 'rloo'"),
    (f"{ESTIMATOR}=pass_at_k", "expected k=..., which has no"),
    (f"{ESTIMATOR}=pass_at_k:k=1.5", "k=1.5: expected a whole"),
    (f"{ESTIMATOR}=rloo:k=2", "'rloo' has no argument 'k'"),
    ("objective.name=sapo:tau_positive=x", "tau_positive=x: expected more tha"),
  ],
)
def test_a_value_outside_its_range(debug_config, override, words):
  refused(debug_config, override, words)


@pytest.mark.parametrize("value", [(3,), (12, 10), (0, 1), (1.0, 2.0)])
def test_a_profile_is_of_a_first_and_a_last_iteration(debug_config, value):
  debug_config.log.profile = value
  with pytest.raises(UserError, match=r"log\.profile=.* such as \(10, 12\)"):
    parse(debug_config)


# Keys that do not go together.


EXACT = "model.exact=True"
LORA = "model.lora.rank=4"
LIMIT = "rollout.max_tokens_per_iteration=4"
STALE = "rollout.max_staleness"
SLOTS = "continuous_batching.slots=4"
DRAFTS = "continuous_batching.speculation=3"
ROUNDS = "rollout.dynamic_sampling_rounds=2"
GDPO, RLOO = f"{ESTIMATOR}=gdpo", f"{ESTIMATOR}=rloo"
PASS_AT_K = f"{ESTIMATOR}=pass_at_k:k"
GAME = "rollout.environment=guessing reward.names=()"
AGENT = f"rollout.environment=openai:a.play reward.names=() {SLOTS}"
PLAYED = f"{GAME} {SLOTS}"
BY_TURN = "objective.credit=turn objective.name"
KL1 = "objective.kl_coef=.1 objective.kl_estimator=k1"


@pytest.mark.parametrize(
  ("overrides", "words"),
  [
    ("objective.score_centering=8 objective.old_logps=sampler",
     "objective.score_centering=8: expected 0 with objective.old_logps='sampl"),
    ("objective.score_centering=8 sampler.top_p=.9 sampler.kept_ids=0",
     "sampler.kept_ids=0: expected 1 or more with objective.score_centering=8"),
    (f"{EXACT} {SLOTS} objective.score_centering=8",
     "objective.score_centering=8: expected 0, for heads are not exact"),
    ("objective.mismatch=tis_token objective.old_logps=sampler",
     "objective.mismatch='tis_token': expected 'none' with"),
    ("objective.reference_every=5",
     "objective.reference_every=5: expected 0 with .*kl_coef=0"),
    (f"objective.name=ppo {ROUNDS}",
     f"{ROUNDS}: expected 1 with objective.name='ppo'"),
    (LIMIT, f"{LIMIT}: expected 0 with continuous_batching.slots"),
    (DRAFTS, f"{DRAFTS}: expected 0 with continuous_batching.slots=0"),
    (f"{STALE}=2 {ROUNDS}", f"{STALE}=2: expected 0 with {ROUNDS}"),
    (f"{LIMIT} {ROUNDS}", f"{LIMIT}: expected 0 with {ROUNDS}"),
    (f"data.drop_solved=True sampler_mesh.devices=4 {STALE}=1",
     "data.drop_solved=True: expected False with sampler_mesh.devices=4"),
    (EXACT, r"slots=0: expected 1 or more, for the static .*exact=True\)"),
    (f"{EXACT} {SLOTS} continuous_batching.page_size=48 "
     "continuous_batching.prefill_chunk=48",
     "page_size=48: expected a power of two"),
    (f"{EXACT} {SLOTS} sampler_mesh.tensor=2", "tensor=2: expected 0 or"),
    (f"{EXACT} {SLOTS} objective.mismatch=icepop",
     "objective.mismatch='icepop': expected 'none', for there is no mis"),
    (GAME, "slots=0: expected 1 or more, .*environment='guessing'"),
    (f"rollout.environment=guessing {SLOTS}",
     r"reward.names=\('final_answer',\): expected \(\), for the environment"),
    (f"{PLAYED} {LIMIT}", f"{LIMIT}: expected 0, for a conver"),
    (f"{AGENT} {LIMIT}", f"{LIMIT}: expected 0"),
    ("rollout.max_sequences=2",
     "max_sequences=2: expected 1 without rollout.e"),
    (f"{BY_TURN}=gspo_token",
     "rollout.environment='': expected one, .*credit='turn'"),
    (f"{RLOO} objective.name=ppo", f"{ESTIMATOR}='rloo': expected 'grpo' with "
     "objective.name='ppo', whose critic gives the advantages"),
    (f"{ESTIMATOR}=max_rl objective.name=dr_grpo",
     f"{ESTIMATOR}='max_rl': expected 'grpo' with objective.name='dr_grpo', "
     "whose advantages are not divided by a std, or"),
    (f"{LORA} optim.freeze_moe_router=True",
     "optim.freeze_moe_router=True: expected False, for only adapters"),
    (f"{LORA} objective.name=ppo", "objective.name='ppo': expected another"),
    (f"{LORA} optim.name=muon", "optim.name='muon': expected 'adamw'"),
    (f"{LORA} model.lora.checkpoint=x",
     "model.lora.checkpoint='x': expected '' with a cold start"),
    ("model.lora.checkpoint=x", "checkpoint='x': expected '' with .*rank=0"),
    (f"{PLAYED} {RLOO} {BY_TURN}=gspo_token",
     "expected 'grpo' with objective.credit='turn', which compares turn with"),
    (f"{ESTIMATOR}=reinforce_plus_plus {KL1}",
     "expected 'grpo' with objective.kl_estimator='k1'"),
    (f"{GDPO} {ROUNDS}", f"{ROUNDS}: expected 1 with {ESTIMATOR}='gdpo'"),
    (f"{GDPO} {PLAYED}", "='gdpo': expected another one, for the envi"),
    (f"{PASS_AT_K}=9", "='pass_at_k:k=9': expected k up to rollout.group_size"),
    (f"{PASS_AT_K}=2 reward.names=length,number",
     r"reward.names=\('length', 'number'\): expected one with"),
    (f"{PLAYED} reward.weights=2",
     r"reward.weights=.*2.*: expected \(1.0,\), for the environment"),
    (f"{PLAYED} {BY_TURN}=gspo_token {ROUNDS}",
     "dynamic_sampling_rounds=2: expected 1, .*credit='turn'"),
    (f"{PLAYED} objective.credit=turn",
     "objective.name='gspo': expected 'gspo_token' or another"),
    (f"{PLAYED} {BY_TURN}=grpo {KL1}",
     "kl_estimator='k1': expected 'k2' or 'k3'"),
  ],
)  # fmt: skip
def test_keys_that_do_not_go_together(debug_config, overrides, words):
  refused(debug_config, overrides, words)


@pytest.mark.parametrize(
  "override",
  ["objective.replay=r3", "objective.name=gspo:router_shift_floor=0.8",
   "objective.name=rspo", "objective.router_aux_loss_coef=.1",
   "objective.router_z_loss_coef=.1", "model.float32_router=True",
   "optim.freeze_moe_router=True"],
)  # fmt: skip
def test_a_dense_model_has_no_routing(debug_config, override):
  debug_config.model.variant = "qwen3-0.6b"
  refused(debug_config, override, "the model is dense")


@pytest.mark.parametrize(
  ("key", "value"),
  [("name", "ppo"), ("advantage_estimator", "reinforce_plus_plus")],
)
def test_some_advantages_need_no_group(debug_config, key, value):
  debug_config.learner.micro_batch_size = 1
  debug_config.rollout.group_size = 1
  debug_config.objective[key] = value
  check_training(parse(debug_config), 1)


def test_rloo_goes_with_a_method_that_divides_by_no_std(debug_config):
  debug_config.objective.name = "dr_grpo"
  debug_config.objective.advantage_estimator = "rloo"
  check_training(parse(debug_config), 1)


def test_a_profile_is_within_the_run(debug_config):
  debug_config.num_steps, debug_config.log.profile = 2, (2, 3)
  with pytest.raises(UserError, match=r"\(2, 3\): .* num_steps=2"):
    build(debug_config)


def test_more_devices_than_rows(debug_config):
  check = lambda: check_training(parse(debug_config), 8)
  with pytest.raises(UserError, match=r"prompts = 4 .*share rows = 8"):
    check()
  debug_config.data.prompts = 8
  with pytest.raises(UserError, match=r"micro_batch_size = 4 .*share rows = 8"):
    check()


def test_rows_are_split_into_equal_parts(debug_config):
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  check = lambda context: check_training(parse(debug_config), 8, context)
  check(context=4)
  debug_config.learner.micro_batch_size = 2
  check(context=4)  # two rows, each on four devices
  with pytest.raises(UserError, match=r"micro_batch_size = 2 .*share rows = 4"):
    check(context=2)
  debug_config.sampler.max_new_tokens += 2
  with pytest.raises(UserError, match=r"max_new_tokens = 22 .* = 4 \(mesh"):
    check(context=4)


def test_heads_are_split_into_equal_parts(debug_config):
  """Four heads, and two of keys."""
  debug_config.mesh.update({"data": 1, "context": 8})
  mesh = sharding.make_mesh(data=1, context=8)
  debug_config.data.prompts = 8

  def check(words):
    with pytest.raises(UserError, match=words):
      build_program(parse(debug_config), mesh, training=False)

  check(r"context=8: .* \[1, 2, 4\], .* device's attention")
  debug_config.model.variant = "tiny-moonlight"
  check(r"context=8: .* \[1, 2, 4\], .* 4 heads of a device's mla")
  debug_config.model.variant = "tiny-qwen3.5"
  debug_config.model.update({"num_heads": 8, "linear_num_value_heads": 6})
  check(r"context=8: .* \[1, 2, 3, 6\], .* 6 heads of a device's delta_net")


@pytest.mark.parametrize(
  ("size", "divisor", "nearest"), [(4, 3, 2), (12, 5, 4), (7, 3, 1), (4, 0, 1)]
)
def test_divides_names_the_nearest_divisor(size, divisor, nearest):
  with pytest.raises(
    UserError, match=f"a = {size} .* b = {divisor};.* {nearest}$"
  ):
    rules.divides("a", size, "b", divisor)
  rules.divides("a", size, "b", nearest)


# The tree.


def test_a_key_that_is_missing_or_unknown(debug_config):
  keys = ConfigDict(debug_config.to_dict())
  del keys.sampler["top_k"]
  with pytest.raises(UserError, match=r"sampler.top_k is missing: expected al"):
    parse(keys)
  for section, key, meant in (
    ("sampler", "group_size", "rollout.group_size"),
    ("rollout", "n", "rollout.group_size"),
    ("optim", "lr", "optim.learning_rate"),
  ):
    keys = ConfigDict(debug_config.to_dict())
    keys[section][key] = 1
    with pytest.raises(UserError, match=f"{section}.{key}: no .* '{meant}'"):
      parse(keys)


def test_a_parsed_config_has_the_values_of_its_keys(debug_config):
  debug_config.log.profile = [1, 3]
  parsed = parse(debug_config)
  assert parsed.log.profile == (1, 3)
  assert hash(parsed) == hash(parse(debug_config))


@pytest.mark.parametrize("sizes", [{}, {"num_layers": 3, "num_experts": 4}])
def test_a_parsed_config_in_json_is_the_config_file(debug_config, sizes):
  """Users read it in run_config.json, and a resumed run compares it."""
  with debug_config.unlocked():
    debug_config.model.update(sizes)
  written = parse(debug_config).as_json()
  assert written == json.loads(debug_config.to_json_best_effort())


def test_the_name_of_the_field_for_sizes_is_no_key(debug_config):
  assert "model.sizes" not in all_keys()
  with debug_config.unlocked():
    debug_config.model.sizes = (("num_layers", 3),)
  with pytest.raises(UserError, match=r"model\.sizes"):
    build(debug_config)


def test_replace_changes_keys_and_no_others(debug_config):
  parsed = parse(debug_config)
  other = parsed.replace(seed=9, data={"prompts": 2})
  assert (other.seed, other.data.prompts) == (9, 2)
  assert other.replace(seed=parsed.seed, data=parsed.data) == parsed


def test_the_model_of_an_earlier_release_has_the_keys_of_this_one(debug_config):
  saved = parse(debug_config).as_json()["model"]
  earlier = {k: v for k, v in saved.items() if k != "float32_head"}
  earlier["lora"] = {k: v for k, v in saved["lora"].items() if k != "alpha"}
  assert parse_model(earlier) == parse_model(saved) == parse(debug_config).model
