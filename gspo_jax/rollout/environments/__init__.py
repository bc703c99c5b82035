"""Environments that come with the package; the protocol is `..environment`."""
