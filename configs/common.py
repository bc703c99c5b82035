"""Every key of a config with its default; see tiny_cpu.py for one.

Change a key on the command line with `--config.optim.learning_rate=2e-4`.

`python -m gspo_jax.program.config_reference` writes this file: a key is
declared in the wing that reads it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """The defaults that all configs start from."""
  c = ConfigDict()
  # Of weights, data order, sampling and shuffles [0 or more, under 2**32]
  c.seed = 0
  # RL iterations: rollout, then `minibatches` updates [0 or more]
  c.num_steps = 30

  c.model = ConfigDict()  # the policy
  # A Hugging Face folder: the first weights, the sizes and the tokenizer
  c.model.checkpoint = ""
  # Without a checkpoint: a name in gspo_jax/model/variants.json
  c.model.variant = "tiny"
  # Of activations; parameters are float32 [float32 | bfloat16]
  c.model.dtype = "bfloat16"
  # Multiply hidden states by the output matrix in float32, in training and
  # sampling, not in `dtype`; logits are float32 in any case
  c.model.float32_head = False
  # Multiply hidden states by the routers in float32, as well
  c.model.float32_router = False
  # The log-probs of sampled responses equal the trainer's in every bit: the
  # same arithmetic in the same order in both
  c.model.exact = False
  # What a block stores for the backward pass: "none": no rematerialisation, it
  # stores all; "full": nothing, it computes all again; else names of KEPT in
  # gspo_jax/model/config.py with commas between, and it computes the rest again
  c.model.remat = "attention,stream"

  # Low-rank adapters: the weights stay as they are, in `model.dtype`, and only
  # the adapters are trained, in float32. The reference policy is the weights
  # without adapters.
  c.model.lora = ConfigDict()
  # Columns of A and rows of B; 0: no adapters, all weights are trained [0 or
  # more]
  c.model.lora.rank = 0
  # Alpha / rank multiplies what an adapter adds [more than 0]
  c.model.lora.alpha = 32.0
  # "attention" (q, k, v and o), "mlp" (gate, up and down of the MLP or of every
  # expert), "all-linear": both
  c.model.lora.targets = "all-linear"
  # A PEFT folder with the first adapters; "": new ones, which change nothing
  # yet
  c.model.lora.checkpoint = ""

  c.mesh = ConfigDict()  # devices along each axis; -1: those left over
  c.mesh.data = -1  # replicas
  c.mesh.fsdp = 1  # parameters and rows are split
  # Parameters and the tokens of each row are split; the heads in attention
  c.mesh.context = 1
  c.mesh.expert = 1  # experts and rows are split
  c.mesh.tensor = 1  # heads, hidden columns and vocabulary are split

  c.sampler_mesh = ConfigDict()  # 0: as in `mesh`; the rest hold other rows
  # Devices of the sampler's own, the last ones; the others train meanwhile.
  # With several processes: half of all devices. 0: all devices sample and train
  # in turns. [0 or more]
  c.sampler_mesh.devices = 0
  # Devices among which experts and vocabulary are split [0 or more]
  c.sampler_mesh.expert = 0
  # Devices among which heads are split, too [0 or more]
  c.sampler_mesh.tensor = 0

  c.data = ConfigDict()  # problems, and the prompts made of them
  # "chain" (the embedded task), jsonl:FILE, parquet:FILE, hf:NAME[:SPLIT] (of
  # the Hugging Face Hub, a folder or a file), tfds:NAME[:SPLIT] or
  # package.module.factory of any Grain source; several with commas between.
  # "chain:steps=4" sets numbers of the chain, see gspo_jax/tasks/chain.py.
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
  # a conversation, else the column of the reference
  c.data.demonstration_field = ""
  # A folder, a *.model, "bytes"; "": the one of model.checkpoint
  c.data.tokenizer = ""
  # Goes before the problem: the system message of the chat template; without a
  # template, text with a blank line after it. A conversation's own replaces it.
  c.data.system_prompt = ""
  # Arguments of the chat template: "enable_thinking=False,effort=high"
  c.data.template_args = ""
  c.data.instruction = "{problem}"  # the prompt, with {problem} in it
  c.data.prompts = 32  # prompts of an RL iteration, over all hosts [at least 1]
  # SRPO: leave out the problems whose responses were all correct
  c.data.drop_solved = False
  # SRPO: ((first iteration, source), ...), the sources that follow `source`
  c.data.curriculum = ()
  # Tokens, the chat template's included [at least 1]
  c.data.max_prompt_length = 32
  # What to do with a longer problem: "error", or "drop" to leave it out
  c.data.too_long = "error"

  c.sampler = ConfigDict()  # how responses are sampled
  # Tokens of a response, the stop token included [at least 1]
  c.sampler.max_new_tokens = 64
  # Divides the logits [more than 0, or 0 for a greedy evaluation]
  c.sampler.temperature = 1.0
  c.sampler.top_k = 0  # sample among the k likeliest tokens; 0: all [0 or more]
  # Sample among the fewest likeliest tokens of this total probability; 1: all
  # [more than 0, at most 1]
  c.sampler.top_p = 1.0
  # Sample among the tokens of at least this share of the likeliest one's
  # probability; 0: all [0 to 1]
  c.sampler.min_p = 0.0
  # With top_k, top_p or min_p log-probs are over the ids that these leave, in
  # the sampler and in the update; if top_k is 0, they leave so many at most. 0:
  # log-probs are over all ids, and samples are off-policy [0 or more]
  c.sampler.kept_ids = 64
  # Strings that also end a response, such as ("</answer>",); they stay in it. A
  # newline or a comma in one needs Python's notation in a shell: "('\n\n',)".
  # [strings that are not empty, as in ('</answer>',)]
  c.sampler.stop = ()

  # Continuous batching over a paged KV cache: a response that ends makes room
  # for the next one
  c.continuous_batching = ConfigDict()
  # Responses that decode together; 0: all of a batch, by the static sampler;
  # evaluations then have as many slots as a batch [0 or more]
  c.continuous_batching.slots = 0
  c.continuous_batching.page_size = 16  # tokens of a page [at least 1]
  # Pages of the pool; 0: as many as `slots` of the longest responses take.
  # `gspo_jax.plan` prints the most that the HBM holds. [0 or more]
  c.continuous_batching.num_pages = 0
  # Prompt tokens of a forward pass; a multiple of `page_size`
  c.continuous_batching.prefill_chunk = 128
  # Tokens that a step drafts of each response, from the texts of its group,
  # while at most 1 of 4 slots is in use; 0: none. It changes no response. [0 or
  # more]
  c.continuous_batching.speculation = 0

  c.rollout = ConfigDict()  # where the responses of an iteration come from
  c.rollout.group_size = 8  # responses a prompt [at least 1]
  # DAPO: batches to sample at most, until one is full of groups whose rewards
  # differ; 1: no dynamic sampling [at least 1]
  c.rollout.dynamic_sampling_rounds = 1
  # Iterations from the policy that samples a batch to the one that learns from
  # it: exactly this number, but for the first batches, and besides those that a
  # partial response takes. With 1 the next batch is sampled before the update,
  # while its rewards are computed. [0 or more]
  c.rollout.max_staleness = 0
  # Partial rollouts: tokens a response may add in an iteration; it continues in
  # the next one, beside data.prompts new prompts. 0: all. Needs
  # continuous_batching.slots. [0 or more]
  c.rollout.max_tokens_per_iteration = 0
  # What answers the policy between its responses, and gives the reward: of
  # BUILT_IN in gspo_jax/rollout/environment.py, or package.module.Class;
  # "name:key=value" sets its arguments. "openai:NAME": an agent, which calls
  # the policy over HTTP; NAME is of BUILT_IN in gspo_jax/rollout/agent.py, or
  # package.module.function. "": none, one response a prompt. Needs
  # continuous_batching.slots and reward.names=(); sampler.max_new_tokens is the
  # length of the whole conversation.
  c.rollout.environment = ""
  c.rollout.max_turns = 8  # responses of a conversation at most [1 to 32767]
  # Sequences of an episode at most. Each has one importance ratio, and the
  # advantage of the episode. More than 1: a response whose context does not
  # begin with an earlier sequence begins a new one, as where a chat template
  # drops the thinking of earlier turns. [at least 1]
  c.rollout.max_sequences = 1

  c.reward = ConfigDict()  # what responses are rewarded for
  # Of gspo_jax/rewards/, package.module.function, or model:FOLDER, a reward
  # model; evaluation is of the first one, and the reward is the weighted sum of
  # all
  c.reward.names = ("final_answer",)
  c.reward.weights = (1.0,)  # one each
  # A response is correct if its first reward is at least this: in pass@k and
  # majority@k, for `cold_start.gate` and for `data.drop_solved` [a finite
  # number]
  c.reward.pass_threshold = 0.5
  # Processes that compute rewards, on each host [at least 1]
  c.reward.workers = 2
  # Calls of async rewards, at once in a process [at least 1]
  c.reward.concurrency = 32
  # Time for one call of a reward, on one response or on a group. After it each
  # response has failed: its reward is the lowest in its group, at most 0.
  # "code" and "judge" need 35. [more than 0]
  c.reward.seconds = 5.0
  # The run stops if a larger share of the responses of an iteration or of an
  # evaluation could not be scored, or all. A judge may fail on a few in a
  # hundred; a reward that fails on half of them is broken. [0 to 1]
  c.reward.max_failed = 0.5

  c.objective = ConfigDict()  # the method, and what is added to its loss
  # The method: gspo, gspo_token, grpo, dr_grpo, dapo, ppo, gmpo, rspo, cispo,
  # sapo, luspo, vespo, dppo_tv, dppo_kl, ctpo, or package.module.function; its
  # numbers follow: 'gspo:clip_low=3e-4,clip_high=4e-4'
  c.objective.name = "gspo"
  # "recompute": by the forward pass of the update; "sampler": as sampled, with
  # no further pass. With model.exact both are the same numbers if all responses
  # are of the newest weights: then no pass runs
  c.objective.old_logps = "recompute"
  # Of the KL to a reference policy; 0: no reference [0 or more]
  c.objective.kl_coef = 0.0
  # "k2", "k3", "k3_unbiased": in the loss; "k1": in the reward
  c.objective.kl_estimator = "k3"
  # Iterations between syncs of the reference; 0: frozen [0 or more]
  c.objective.reference_every = 0
  c.objective.entropy_coef = 0.0  # of the entropy bonus [0 or more]
  # Of the routers' load-balancing loss; 0: none [0 or more]
  c.objective.router_aux_loss_coef = 0.0
  # Of the routers' z-loss; 0: none [0 or more]
  c.objective.router_z_loss_coef = 0.0
  # Importance weights between sampler and trainer: 'tis_token:cap=2',
  # tis_sequence, 'mis_token:cap=2,floor=0.5', mis_sequence,
  # 'icepop:cap=5,floor=0.5'
  c.objective.mismatch = "none"
  # Mean log-ratio of a response, from the policy to the sampler, above which a
  # negative advantage does not count; 0: none [0 or more]
  c.objective.off_policy_mask_threshold = 0.0
  # Score centering by so many of a token's likeliest ids, such as 64, whose
  # log-probs the sampler records; 0: none [0 or more]
  c.objective.score_centering = 0
  # Routing Replay: the experts of the old policy ("r2") or of the sampler
  # ("r3") [none | r2 | r3]
  c.objective.replay = "none"
  # How rewards become advantages: grpo, rloo, reinforce_plus_plus,
  # reinforce_plus_plus_baseline, max_rl, 'pass_at_k:k=4', gdpo
  c.objective.advantage_estimator = "grpo"
  # What a response that was cut counts for: "train": as any other;
  # "zero_advantage": it has no advantage, but counts in the mean; "mask":
  # overlong filtering, it has no part in the loss. Its reward always counts in
  # the mean of its group
  c.objective.truncated = "train"
  # "response": one advantage, of the whole conversation; "turn": one for each
  # turn
  c.objective.credit = "response"

  # On-policy distillation from frozen teachers
  c.objective.distillation = ConfigDict()
  # Each a Hugging Face folder, a run's workdir (its newest checkpoint) or
  # WORKDIR/checkpoints/STEP, with the policy's vocabulary; (): no distillation.
  # One teaches all problems; several: one for each source of data.source, in
  # its order
  c.objective.distillation.teachers = ()
  # The column of the problems that names their teacher; teachers are then
  # "NAME=FOLDER"
  c.objective.distillation.teacher_key = ""
  # Of a token's teacher log-prob minus old log-prob [0 or more]
  c.objective.distillation.coef = 1.0
  # Of the advantages of rewards; 0: rewards are logged, not learned from [0 or
  # more]
  c.objective.distillation.reward_weight = 0.0

  c.learner = ConfigDict()  # how a batch is cut into updates
  c.learner.minibatches = 4  # optimizer steps an iteration (GSPO, sec. 5.1)
  # Packed rows of a forward and backward pass, over all devices
  c.learner.micro_batch_size = 64

  c.optim = ConfigDict()  # the optimizer
  # "adamw", or "muon": Muon for the matrices of the blocks, AdamW for the rest.
  # "adamw:b1=0.9,b2=0.95,eps=1e-8,weight_decay=0.0" are the defaults of both;
  # only matrices decay.
  c.optim.name = "adamw"
  c.optim.learning_rate = 1e-6  # its peak [0 or more]
  c.optim.warmup_steps = 0  # optimizer steps [0 or more]
  # After the warm-up, until `num_steps`: "constant", "linear" or "cosine";
  # "cosine:min_lr_ratio=0.1" ends at a tenth of the peak, in place of 0
  c.optim.decay = "constant"
  c.optim.clip_norm = 1.0  # largest global norm of the gradient [more than 0]
  # Keep the routers as they are; a cold start still trains them
  c.optim.freeze_moe_router = False

  c.cold_start = ConfigDict()  # supervised fine-tuning before RL
  c.cold_start.steps = 0  # optimizer steps at most; 0: none [0 or more]
  c.cold_start.batch = 64  # demonstrations a step
  # Its peak, after at most 50 steps of warm-up; a cosine decays to a tenth
  # [more than 0]
  c.cold_start.learning_rate = 0.002
  # Greedy accuracy that ends it; 0: run all steps [0 to 1]
  c.cold_start.gate = 0.9

  c.eval = ConfigDict()  # held-out problems
  # Iterations; also before the first and after the last. 0: no evaluation. [0
  # or more]
  c.eval.every = 10
  c.eval.prompts = 256  # held-out problems [at least 1]
  # Responses to each: the n of avg@n and pass@n [at least 1]
  c.eval.samples = 8

  c.checkpoint = ConfigDict()  # when a run is saved
  # Iterations; also after the last, and on SIGTERM [at least 1]
  c.checkpoint.every = 10
  c.checkpoint.keep = 3  # newest checkpoints to keep [at least 1]

  c.log = ConfigDict()  # what a run writes besides its scalars
  # How far the routing moved (not with model.exact, where this alone would take
  # a scoring pass), and histograms of ratios; False saves memory
  c.log.instruments = True
  # Responses to write, every 10 iterations and after the last [0 or more]
  c.log.samples = 4
  c.log.wandb = ""  # a project in Weights & Biases; "": none
  # (first, last) iteration of a trace in <workdir>/profile; (): none [() for
  # none, or the first and the last iteration, such as (10, 12)]
  c.log.profile = ()
  return c
