"""Hash functions of attention: from vectors to bucket codes."""

from megasparse.ops.hashing.eager import angular_hash

__all__ = ["angular_hash"]
