"""Every key of a config, with its unit or its reason; see tiny_cpu.py for one.

Change a key on the command line with `--config.optim.learning_rate=2e-4`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """The defaults that all configs start from."""
  c = ConfigDict()
  c.seed = 0  # of weights, data order, sampling and shuffles
  c.num_steps = 30  # RL iterations: rollout, then `minibatches` updates

  c.model = ConfigDict()  # the policy
  # A Hugging Face folder: the first weights, the sizes and the tokenizer.
  c.model.checkpoint = ""
  c.model.variant = "tiny"  # without one: a name in gspo_jax/model/config.py
  c.model.dtype = "bfloat16"  # of activations; parameters are float32
  c.model.remat = True  # recompute blocks in the backward pass: less memory
  # What is stored all the same, of KEPT in gspo_jax/model/config.py.
  c.model.keep = ("attention", "stream")

  # Low-rank adapters: the weights stay as they are, in `model.dtype`, and only
  # the adapters are trained, in float32. The reference policy is the weights
  # without adapters.
  c.model.lora = ConfigDict()
  c.model.lora.rank = 0  # of each adapter; 0: none, all weights are trained
  c.model.lora.alpha = 32.0  # alpha / rank multiplies what an adapter adds
  # "attention", "mlp" (the MLP, or every expert), "all-linear": both.
  c.model.lora.targets = "all-linear"
  # A PEFT folder with the first adapters; "": new ones, which change nothing
  # yet.
  c.model.lora.checkpoint = ""

  c.mesh = ConfigDict()  # devices along each axis; -1: those left over
  c.mesh.data = -1  # replicas
  c.mesh.fsdp = 1  # parameters and rows are split
  # Parameters and the tokens of each row are split; the heads in attention.
  c.mesh.context = 1
  c.mesh.expert = 1  # experts and rows are split
  c.mesh.tensor = 1  # heads, hidden columns and vocabulary are split

  c.sampler_mesh = ConfigDict()  # 0: as in `mesh`; the rest hold other rows
  # Devices of the sampler's own, the last ones; the others train meanwhile.
  # With several processes: half of all devices. 0: all devices sample and
  # train in turns.
  c.sampler_mesh.devices = 0
  c.sampler_mesh.expert = 0  # devices among which experts and vocabulary split
  c.sampler_mesh.tensor = 0  # devices among which heads are split, too

  c.data = ConfigDict()  # problems, and the prompts made of them
  # "chain" (the embedded task), jsonl:FILE, parquet:FILE, hf:NAME[:SPLIT] (of
  # the Hugging Face Hub, a folder or a file), tfds:NAME[:SPLIT] or
  # package.module.factory of any Grain source; several with commas between.
  c.data.source = "chain"
  c.data.weights = ()  # shares of several sources; (): equal shares
  c.data.eval_source = ""  # held-out problems; "": 1/8 of `source`, by hash
  # The column with the text of the problem, or with a conversation: a list of
  # {role, content}. "": the first found, in any case, of question, problem,
  # prompt, messages.
  c.data.problem_field = ""
  # The column with the reference: the text after its last ####, or all of it.
  # "": the first found, in any case, of answer, final_answer, solution,
  # ground_truth, reward_model.ground_truth; a dot names a value in an object.
  c.data.reference_field = ""
  # The column with responses to imitate; "": the assistant's message that ends
  # a conversation, else that of the reference.
  c.data.demonstration_field = ""
  c.data.tfds_dir = ""  # the folder of TFDS data sets; "": TFDS's default
  c.data.tokenizer = ""  # a folder, a *.model, "bytes"; "": of model.checkpoint
  # Goes before the problem: the system message of the chat template; without a
  # template, text with a blank line after it. A conversation's own replaces it.
  c.data.system_prompt = ""
  # Arguments of the chat template: "enable_thinking=False,effort=high".
  c.data.template_args = ""
  c.data.instruction = "{problem}"  # the prompt, {problem} in it
  # Problems of the training part that every prompt shows first, each with its
  # demonstration. They are not trained on.
  c.data.few_shot = 0
  c.data.chain_steps = (8,)  # chain: lengths to sample from
  c.data.prompts = 32  # prompts an RL iteration, over all hosts
  # SRPO: leave out the problems whose responses were all correct.
  c.data.drop_solved = False
  # SRPO: ((first iteration, source), ...), the sources that follow `source`.
  c.data.curriculum = ()
  c.data.max_prompt_length = 32  # tokens, the chat template's included
  c.data.too_long = "error"  # "drop": leave out problems longer than that

  c.sampler = ConfigDict()  # how responses are sampled
  c.sampler.max_new_tokens = 64  # tokens of a response, the stop token included
  c.sampler.temperature = 1.0  # divides the logits
  c.sampler.top_k = 0  # 0: all; otherwise samples are off-policy
  c.sampler.top_p = 1.0  # 1: all; otherwise samples are off-policy
  # Least probability, times that of the likeliest token; 0: all, otherwise
  # samples are off-policy.
  c.sampler.min_p = 0.0
  c.sampler.min_new_tokens = 1  # tokens before a stop token is allowed
  # Strings that also end a response, such as ("</answer>",); they stay in it. A
  # newline or a comma in one needs Python's notation: "('\n\n',)" in a shell.
  c.sampler.stop = ()

  # Continuous batching over a paged KV cache: a response that ends makes room
  # for the next one.
  c.continuous_batching = ConfigDict()
  # Responses that decode together; 0: the static sampler, all of a batch.
  c.continuous_batching.slots = 0
  c.continuous_batching.page_size = 16  # tokens of a page
  # Pages of the pool; 0: as many as `slots` of the longest responses take.
  # `gspo_jax.plan` prints the most that the HBM holds.
  c.continuous_batching.num_pages = 0
  c.continuous_batching.segment_steps = 32  # decode steps between host checks
  c.continuous_batching.prefill_chunk = 128  # prompt tokens a forward pass

  c.rollout = ConfigDict()  # where the responses of an iteration come from
  c.rollout.group_size = 8  # responses a prompt
  # DAPO: batches to sample at most, until one is full of groups whose rewards
  # differ; 1: no dynamic sampling.
  c.rollout.dynamic_sampling_rounds = 1
  # Iterations from the policy that samples a batch to the one that learns from
  # it: exactly so many, but for the first batches, and besides those that a
  # partial response takes. With 1 the next batch is sampled before the update,
  # while its rewards are computed.
  c.rollout.max_staleness = 0
  # Seconds to wait for a batch of a sampler with devices of its own
  # (sampler_mesh.devices); then the run ends. 0: for ever.
  c.rollout.timeout = 3600.0
  # Partial rollouts: tokens a response may add in an iteration; it continues in
  # the next one. 0: all. Needs continuous_batching.slots and
  # rollout.extra_prompts_in_flight.
  c.rollout.max_tokens_per_iteration = 0
  c.rollout.extra_prompts_in_flight = 0  # prompts in flight beside data.prompts
  # What answers the policy between its responses, and gives the reward: of
  # BUILT_IN in gspo_jax/rollout/environment.py, or package.module.Class;
  # "name:key=value" sets its arguments. "": none, one response a prompt. Needs
  # continuous_batching.slots and reward.names=(); sampler.max_new_tokens is the
  # length of the whole conversation.
  c.rollout.environment = ""
  c.rollout.max_turns = 8  # responses of a conversation at most

  c.reward = ConfigDict()  # what responses are rewarded for
  # Of gspo_jax/rewards/, or package.module.function; evaluation is of the first
  # one, and the reward is the weighted sum of all.
  c.reward.names = ("final_answer",)
  c.reward.weights = (1.0,)  # one each
  # A response is correct if its first reward is at least this: in pass@k and
  # majority@k, for `cold_start.gate` and for `data.drop_solved`.
  c.reward.pass_threshold = 0.5
  c.reward.workers = 2  # processes that compute rewards, on each host
  c.reward.concurrency = 32  # calls of async rewards, at once in a process
  # Time for one call of a reward, on one response or on a group; after it the
  # reward is 0. "code" and "judge" need 35.
  c.reward.seconds = 5.0
  # The run stops if a larger share of the responses of an iteration or of an
  # evaluation could not be scored, or all. A judge may fail on a few in a
  # hundred; a reward that fails on half of them is broken.
  c.reward.max_failed = 0.5

  c.objective = ConfigDict()  # the method, and what is added to its loss
  # gspo, gspo_token, grpo, dr_grpo, dapo, ppo, gmpo, rspo, cispo, sapo, or
  # package.module.function; its numbers follow:
  # "gspo:clip_low=3e-4,clip_high=4e-4"
  c.objective.name = "gspo"
  # "recompute": by the forward pass of the update; "sampler": as sampled, with
  # rounding that in bfloat16 can exceed GSPO's clip range. With off-policy
  # rollouts, "recompute" is the policy that learns, "sampler" the one that
  # sampled.
  c.objective.old_logps = "recompute"
  c.objective.kl_coef = 0.0  # of the KL to a reference policy; 0: no reference
  c.objective.kl_estimator = "k3"  # "k2", "k3": in the loss; "k1": the reward
  c.objective.reference_every = 0  # iterations between syncs; 0: frozen
  c.objective.entropy_coef = 0.0  # of the entropy bonus
  # Importance weights between sampler and trainer: tis_token, tis_sequence
  # (truncated), mis_token, mis_sequence (masked), as in
  # "mis_token:cap=2,floor=0.5".
  c.objective.mismatch = "none"
  # Routing Replay: the old policy's experts ("r2") or the sampler's ("r3").
  c.objective.replay = "none"
  c.objective.zero_truncated = False  # no advantage for truncated responses
  # "response": one advantage, of the whole conversation. "turn": one for each
  # turn, of the rewards from there on; for methods with an advantage a token.
  c.objective.credit = "response"

  c.learner = ConfigDict()  # how a batch is cut into updates
  c.learner.minibatches = 4  # optimizer steps an iteration (GSPO, sec. 5.1)
  c.learner.micro_batch_size = 64  # packed rows of a forward and backward pass

  c.optim = ConfigDict()  # the optimizer
  # "adamw", or "muon": Muon for the matrices of the blocks, AdamW for the rest.
  c.optim.name = "adamw"
  c.optim.learning_rate = 1e-6  # its peak
  c.optim.warmup_steps = 0  # optimizer steps
  # "constant", "linear", "cosine": after the warm-up, until `num_steps`.
  c.optim.decay = "constant"
  c.optim.min_lr_ratio = 0.0  # where `decay` ends, as a share of the peak
  c.optim.b1 = 0.9  # decay of AdamW's first moment
  c.optim.b2 = 0.95  # decay of AdamW's second moment
  c.optim.weight_decay = 0.0  # on matrices only
  c.optim.clip_norm = 1.0  # largest global norm of the gradient

  c.cold_start = ConfigDict()  # supervised fine-tuning before RL
  c.cold_start.steps = 0  # optimizer steps at most; 0: none
  c.cold_start.batch = 64  # demonstrations a step
  c.cold_start.learning_rate = 2e-3  # its peak; a cosine decays to a tenth
  c.cold_start.warmup_steps = 50  # optimizer steps
  c.cold_start.gate = 0.9  # greedy accuracy that ends it; 0: run all steps
  c.cold_start.check_every = 50  # steps between measurements and saves
  c.cold_start.chain_steps = (2, 4, 6, 8)  # chain: lengths demonstrated
  c.cold_start.chain_noise = 0.12  # chain: share of random results
  c.cold_start.dir = ""  # its folder; "": <workdir>/cold_start

  # Held-out problems: before the first iteration, during the run, at its end.
  c.eval = ConfigDict()
  # Iterations; also before the first and after the last. 0: no evaluation.
  c.eval.every = 10
  c.eval.prompts = 256  # held-out problems
  c.eval.samples = 8  # responses to each: the n of avg@n and pass@n

  c.checkpoint = ConfigDict()  # when a run is saved
  c.checkpoint.every = 10  # iterations; also after the last, and on SIGTERM
  c.checkpoint.keep = 3  # newest checkpoints to keep

  c.log = ConfigDict()  # what a run writes besides its scalars
  # How far the routing moved, and histograms of ratios; False saves memory.
  c.log.instruments = True
  c.log.samples_every = 10  # iterations between sample responses
  c.log.samples = 4  # how many to write
  c.log.wandb = ""  # a project in Weights & Biases; "": none
  # (first, last) iteration of a trace in <workdir>/profile; (): none
  c.log.profile = ()
  return c


def shrink(c: ConfigDict) -> ConfigDict:
  """A config for any machine: seconds, and nothing is learnt."""
  c.num_steps = 2
  c.model.variant = "tiny"
  c.model.dtype = "float32"
  c.mesh = ConfigDict(
    {"data": -1, "fsdp": 1, "context": 1, "expert": 1, "tensor": 1}
  )
  c.sampler_mesh = ConfigDict({"devices": 0, "expert": 0, "tensor": 0})
  c.data.source = "chain"
  c.data.eval_source = c.data.tokenizer = ""
  c.data.instruction = "{problem}"
  c.data.system_prompt = ""
  c.data.chain_steps = (1,)
  c.data.prompts = 8
  c.data.max_prompt_length = 8
  c.rollout.group_size = 4
  c.sampler.max_new_tokens = 12
  c.learner.micro_batch_size = 8
  c.continuous_batching.slots = 0
  c.rollout.max_staleness = 0
  c.rollout.max_tokens_per_iteration = 0
  c.rollout.extra_prompts_in_flight = 0
  c.reward.names = ("final_answer",)
  c.reward.weights = (1.0,)
  c.cold_start.steps = 0
  c.eval.prompts = 8
  c.eval.samples = 4
  c.log.profile = ()
  return c


def with_recipe(c: ConfigDict, name: str) -> ConfigDict:
  """The config with the method of a paper: a name of `RECIPES`, or ""."""
  if name and name not in RECIPES:
    raise ValueError(f"recipe={name}: expected one of {', '.join(RECIPES)}")
  if name:
    RECIPES[name](c)
  return c


def _dapo(c: ConfigDict) -> None:
  c.objective.name = "dapo"
  c.rollout.dynamic_sampling_rounds = 3
  buffer = c.sampler.max_new_tokens // 5  # 4,096 of 20,480 in the paper
  c.reward.names = (c.reward.names[0], f"overlong:buffer={buffer}")
  c.reward.weights = (1.0, 1.0)


def _srpo(c: ConfigDict) -> None:
  c.objective.name = "grpo"
  c.objective.zero_truncated = True
  c.data.drop_solved = True


# Of the papers in configs/dapo.py and configs/srpo.py.
RECIPES = {"dapo": _dapo, "srpo": _srpo}
