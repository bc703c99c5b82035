"""A config and a mesh become frozen settings and jitted functions.

Other wings take these modules:
  command      the flags and exit codes of the commands; imports no JAX
  config       Config, and `parse`, the only reader of a ConfigDict
  config_reference  what each key means; writes configs/common.py
  experiment   Experiment, what a run consists of, and `prepare`
  first_difference  where a run with model.exact is not exact
  functions    Program and `build_program`: all jitted functions of a run
  learner_functions, sampler_functions  its groups, each beside its shardings
  abstract     shapes and shardings of weights and states
  load_params  the weights of a checkpoint or Hugging Face folder
  settings     the frozen settings that a config gives each wing
"""
