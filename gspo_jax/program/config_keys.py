"""Suggestions for a key that a config does not have."""

from collections.abc import Collection, Sequence

from gspo_jax.runtime.errors import either, mistyped

# For each key, names of the same or a similar key in TRL, verl, OpenRLHF, NeMo
# RL, MaxText and Tunix. A name may belong to several keys: the typed section
# decides, else the first. A name with a dot is the end of a longer one, such as
# verl's actor_rollout_ref.model.path. `key=value` is a number in a key's spec.
OTHER_NAMES = {
  "num_steps": "num_steps max_steps steps total_steps total_training_steps "
  "max_num_steps num_episodes num_train_epochs num_epochs total_epochs epochs",
  "model.checkpoint": "model_name_or_path model_name model.name model_id "
  "model_path model.path pretrain load_parameters_path",
  "model.dtype": "bf16 fp16 torch_dtype param_dtype precision mixed_precision",
  "model.float32_head": "cast_lm_head_to_fp32 head_dtype fp32_lm_head "
  "enable_fp32_lm_head logits_dot_in_fp32",
  "model.float32_router": "moe_router_dtype router_dtype float32_gate_logits",
  "model.remat": "gradient_checkpointing enable_gradient_checkpointing "
  "activation_checkpointing remat_policy",
  "mesh.data": "ici_data_parallelism dcn_data_parallelism data_parallel_size",
  "mesh.fsdp": "ici_fsdp_parallelism fsdp_size",
  "mesh.context": "ici_context_parallelism context_parallel_size "
  "ulysses_sequence_parallel_size",
  "mesh.expert": "ici_expert_parallelism expert_model_parallel_size",
  "mesh.tensor": "ici_tensor_parallelism tensor_model_parallel_size",
  "sampler_mesh.devices": "rollout.n_gpus_per_node",
  "sampler_mesh.tensor": "vllm_tensor_parallel_size "
  "rollout.tensor_model_parallel_size",
  "data.source": "dataset dataset_name dataset_path train_files prompt_data",
  "data.eval_source": "val_files eval_dataset",
  "data.problem_field": "prompt_key input_key",
  "data.reference_field": "label_key answer_key",
  "data.instruction": "prompt_template few_shot num_few_shot",
  "data.template_args": "chat_template_kwargs apply_chat_template_kwargs",
  "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path",
  "data.prompts": "batch_size train_batch_size rollout_batch_size "
  "gen_batch_size generation_batch_size num_prompts_per_step",
  "data.max_prompt_length": "prompt_max_len data.max_length",
  "data.too_long": "filter_overlong_prompts truncation",
  "sampler.max_new_tokens": "max_completion_length response_length "
  "max_response_length generate_max_len max_tokens total_generation_steps "
  "max_length max_total_sequence_length max_target_length",
  "sampler.stop": "stop_strings stop_sequences",
  "sampler.kept_ids": "sampling_mask keep_sampling_mask sampling_replay",
  "continuous_batching.slots": "use_vllm use_transformers_paged max_num_seqs",
  "continuous_batching.page_size": "block_size",
  "continuous_batching.num_pages": "num_gpu_blocks",
  "continuous_batching.speculation": "num_speculative_tokens "
  "speculative_num_draft_tokens",
  "rollout.group_size": "num_generations num_generations_per_prompt n "
  "n_samples_per_prompt",
  "rollout.dynamic_sampling_rounds": "max_num_gen_batches dynamic_filtering "
  "use_dynamic_sampling filter_groups filter_groups.enable",
  "rollout.max_staleness": "one_step_off_policy async_train async_grpo "
  "staleness_threshold max_head_offpolicyness",
  "reward.seconds": "timeout environment_timeout",
  "reward.names=model:FOLDER": "reward_model_path reward_model "
  "reward_model.path reward_model.model.path reward_model.model_path "
  "reward_model_name_or_path reward_pretrain rm_path",
  "reward.names": "reward_funcs reward_fn custom_reward_function "
  "custom_reward_function.path custom_reward_function.name remote_rm_url",
  "reward.weights": "reward_weights",
  "reward.workers": "reward.num_workers",
  "objective.name": "loss_type loss_mode loss_agg_mode policy_loss_type "
  "importance_sampling_level",
  "objective.advantage_estimator": "adv_estimator advantage scale_rewards "
  "norm_adv_by_std_in_grpo multi_objective_aggregation algo.type "
  "adv_estimator.name",
  "objective.name=gspo:clip_low=3e-4": "clip_low epsilon clip_ratio "
  "clip_ratio_low cliprange clip_eps eps_clip eps_clip_low_high ratio_clip_min",
  "objective.name=gspo:clip_high=4e-4": "clip_high epsilon_high "
  "clip_ratio_high ratio_clip_max",
  "objective.name=grpo:dual_clip=3.0": "dual_clip clip_ratio_c ratio_clip_c "
  "delta",
  "objective.name=ppo:critic_learning_rate=1e-5": "critic_learning_rate "
  "critic.lr critic.optim.lr critic.learning_rate",
  "objective.name=ppo:critic_warmup_steps=20": "critic_warmup_steps "
  "critic.warmup_steps critic_warmup",
  "objective.name=ppo:critic_clip=0.2": "critic_clip critic.clip "
  "cliprange_value value_clip vf_clip",
  "objective.name=ppo:critic_discount=1.0": "critic_discount critic.discount "
  "gamma",
  "objective.name=ppo:critic_trace_decay=0.95": "critic_trace_decay "
  "critic.trace_decay lam lambd gae_lambda",
  "objective.name=cispo:cap=5.0": "cap",
  "objective.name=sapo:tau_positive=1.0": "tau_positive tau_pos "
  "sapo_temperature_pos",
  "objective.name=sapo:tau_negative=1.05": "tau_negative tau_neg "
  "sapo_temperature_neg",
  "objective.name=vespo:k_positive=2.0": "k_positive vespo_k_pos",
  "objective.name=vespo:lambda_positive=3.0": "lambda_positive "
  "vespo_lambda_pos",
  "objective.name=vespo:k_negative=3.0": "k_negative vespo_k_neg",
  "objective.name=vespo:lambda_negative=2.0": "lambda_negative "
  "vespo_lambda_neg",
  "objective.name=dppo_tv:delta=0.2": "dppo_mask_low dppo_mask_high delta_low "
  "delta_high divergence_threshold",
  "objective.name=gspo:router_shift_floor=0.8": "router_shift_floor",
  "objective.kl_coef": "beta kl_beta kl_loss_coef use_kl_loss init_kl_coef "
  "reference_policy_kl_penalty",
  "objective.kl_estimator": "kl_loss_type kl_penalty use_kl_in_reward",
  "objective.kl_estimator=k3_unbiased": "use_bias_correction_kl "
  "use_unbiased_kl",
  "objective.reference_every": "sync_ref_model ref_model_sync_steps",
  "objective.entropy_coef": "entropy_coeff",
  "objective.router_aux_loss_coef": "router_aux_loss_coef moe_aux_loss_coeff "
  "moe_aux_loss_coef aux_loss_coef load_balance_loss_weight",
  "objective.router_z_loss_coef": "router_z_loss_coef moe_z_loss_coeff",
  "objective.mismatch": "vllm_importance_sampling_correction rollout_is "
  "vllm_importance_sampling_mode enable_vllm_is_correction "
  "use_importance_sampling_correction",
  "objective.mismatch=mis_token:floor=0.5": "mismatch_floor",
  "objective.mismatch=tis_token:cap=2.0": "mismatch_cap "
  "vllm_importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold "
  "truncated_importance_sampling_ratio",
  "objective.mismatch=icepop:cap=5.0,floor=0.5": "icepop",
  "objective.off_policy_mask_threshold": "opsm_delta use_opsm",
  "objective.replay": "router_replay router_replay.mode routing_replay",
  "objective.truncated": "zero_truncated mask_truncated_completions "
  "overlong_filtering apply_overlong_filtering zero_truncated_completions",
  "objective.distillation.teachers": "teacher_model teacher_models "
  "teacher_model_name_or_path teacher_model.model_path teacher.model_name "
  "teacher_model_path opd_teacher_load use_opd",
  "objective.distillation.teacher_key": "teacher_id",
  "objective.distillation.coef": "opd_kl_coef distillation_loss_coef "
  "kl_penalty_coef",
  "objective.distillation.reward_weight": "use_task_rewards",
  "learner.minibatches": "learner.epochs num_iterations ppo_epochs "
  "ppo_mini_batch_size mini_batch_size num_mini_batches "
  "steps_per_generation train_global_batch_size",
  "learner.micro_batch_size": "per_device_train_batch_size "
  "per_device_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
  "micro_train_batch_size train_micro_batch_size gradient_accumulation_steps",
  "optim.name": "optim optimizer optimizer_name",
  "optim.name=adamw:b1=0.9": "b1 beta1 adam_b1 adam_beta1 betas adam_betas",
  "optim.name=adamw:b2=0.95": "b2 beta2 adam_b2 adam_beta2",
  "optim.name=adamw:eps=1e-8": "eps adam_eps adam_epsilon adamw_eps",
  "optim.name=adamw:weight_decay=0.1": "weight_decay adam_weight_decay l2",
  "optim.learning_rate": "learning_rate lr actor_learning_rate",
  "optim.decay": "schedule lr_scheduler_type lr_scheduler "
  "lr_decay_style warmup_style",
  "optim.decay=cosine:min_lr_ratio=0.1": "min_lr_ratio min_lr_rate min_lr "
  "cosine_learning_rate_final_fraction",
  "optim.warmup_steps": "warmup_steps warmup warmup_ratio lr_warmup_steps "
  "lr_warmup_ratio lr_warmup_steps_ratio warmup_steps_fraction",
  "optim.freeze_moe_router": "freeze_moe_router freeze_router",
  "optim.clip_norm": "max_grad_norm grad_clip clip_grad_norm "
  "gradient_clipping gradient_clipping_threshold",
  "cold_start.steps": "steps max_steps num_steps",
  "cold_start.batch": "batch_size train_batch_size",
  "cold_start.learning_rate": "learning_rate lr",
  "eval.every": "eval_steps eval_interval eval_every_n_steps test_freq "
  "val_period",
  "eval.prompts": "max_val_samples",
  "eval.samples": "n val_kwargs.n num_generations_eval "
  "eval_n_samples_per_prompt",
  "checkpoint.every": "save_steps save_freq save_period save_interval_steps "
  "checkpoint_period",
  "checkpoint.keep": "save_total_limit keep_top_k max_to_keep max_ckpt_num "
  "max_actor_ckpt_to_keep",
  "log.samples": "log_completions num_completions_to_print",
}

# The unit of a key, where other trainers count in another unit.
_COUNTS = {
  "num_steps": "iterations, each a rollout and its updates",
  "data.prompts": "prompts an iteration",
  "rollout.dynamic_sampling_rounds": "batches sampled at most",
  "data.instruction": "the text around {problem}, examples included",
  "sampler.max_new_tokens": "tokens of a response, without its prompt",
  "continuous_batching.slots": "responses that decode together",
  "objective.name": "a method and its numbers, as "
  "gspo:clip_low=3e-4,clip_high=4e-4",
  "objective.advantage_estimator": "grpo divides by the "
  "std of the group, rloo by none",
  "objective.mismatch": "as tis_token:cap=2",
  "objective.kl_coef": "0: no reference",
  "objective.truncated": "mask or zero_advantage",
  "objective.reference_every": "iterations",
  "learner.minibatches": "optimizer steps an iteration",
  "learner.micro_batch_size": "packed rows of one pass, over all devices",
  "optim.warmup_steps": "optimizer steps",
  "eval.every": "iterations",
  "checkpoint.every": "iterations",
}


# Last parts of keys that mean something else in each section.
_GENERIC = ("name", "dir", "steps", "batch", "clip")


def near(key: str, keys: Collection[str]) -> list[str]:
  """Keys that may be meant: by a name in other trainers, else by a typo."""
  named = _of_other_trainers(key, keys)
  return named or _typo(key, keys) + _in_another_section(key, keys)


def did_you_mean(meant: Sequence[str], prefix: str = "") -> str:
  """The question after the keys of `near`, each with `prefix` before it."""
  counts = _COUNTS.get(meant[0], "") if len(meant) == 1 else ""
  names = either(prefix + key for key in meant)
  return f"did you mean {names}{counts and f' ({counts})'}?"


def hint(key: str, keys: Collection[str]) -> str:
  """The end of the error for an unknown key: keys of `near`, else a list."""
  if meant := near(key, keys):
    return did_you_mean(meant)
  section = key.partition(".")[0] + "."
  inside = [k.removeprefix(section) for k in keys if k.startswith(section)]
  if inside:
    return f"{section[:-1]} has {', '.join(sorted(inside))}"
  sections = sorted({k.partition(".")[0] for k in keys if "." in k})
  alone = sorted(k for k in keys if "." not in k)
  return f"sections are {', '.join(sections)}; without one: {', '.join(alone)}"


def _of_other_trainers(key, keys):
  parts = key.split(".")
  for i in range(len(parts)):
    name = _plain(".".join(parts[i:]))
    ours = [
      k
      for k, others in OTHER_NAMES.items()
      if k.partition("=")[0] in keys and name in map(_plain, others.split())
    ]
    if ours:
      in_section = [k for p in parts for k in ours if k.startswith(f"{p}.")]
      return (in_section or ours)[:1]
  return []


def _in_another_section(key, keys):
  section, _, leaf = key.rpartition(".")
  same = sorted(k for k in keys if _plain(_leaf(k)) == _plain(leaf))
  meant = mistyped(section, {k.rpartition(".")[0] for k in same})
  near = [k for k in same if k.rpartition(".")[0] in meant]
  return near or ([] if leaf in _GENERIC else same)


def _typo(key, keys):
  section, _, leaf = key.rpartition(".")
  inside = [k for k in sorted(keys) if k.rpartition(".")[0] == section]
  meant = mistyped(leaf, [_leaf(k) for k in inside])
  return [k for k in inside if _leaf(k) in meant]


def _leaf(key: str) -> str:
  return key.rpartition(".")[2]


def _plain(name: str) -> str:
  """The name in lower case without _ and -."""
  return name.replace("_", "").replace("-", "").lower()
