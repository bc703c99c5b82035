"""Processes and devices. Nothing here is specific to RL.

Other wings take these modules:
  errors             UserError, and the hint to the nearest valid choice
  command            flags and exit codes of the small commands
  key                a key of a config: default, meaning and range
  spec               a name with arguments, such as `overlong:buffer=8`
  multihost          one program on many processes: start, gather, agree
  compilation_cache  compiled programs on disk, for the next process
  mesh_jit           functions on a mesh, whose executables are kept
  notebook           the jax for a machine, and what it runs on
  sharding           the device mesh, and the table of parameter shardings
  tpus               what programs do differently on a kind of TPU
  preemption         Preemption: SIGTERM as a flag that all processes agree on
"""
