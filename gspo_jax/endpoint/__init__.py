"""An HTTP endpoint of an engine, in the form of OpenAI's API.

`requests` reads what a client sends, `client` makes token ids of messages and
asks an engine, `answers` writes what the client gets, `app` joins them,
`server` listens. Rollouts of agents and `gspo_jax.serve` use it. It needs the
extra `serve`.
"""

__all__ = ["answers", "app", "client", "requests", "server"]
