"""A pool of tasks in separate processes, with limits; and a sandbox.

`pool` runs tasks, functions of a picklable request that return JSON, under
limits of time, memory and concurrency; `process` has a task's call and result.
`sandbox` runs programs of a policy, `sandbox_files` says what they may read,
`seccomp` which system calls they may make. The wing knows nothing of rewards,
environments or JAX.
"""

__all__ = ["pool", "process", "sandbox", "sandbox_files"]
