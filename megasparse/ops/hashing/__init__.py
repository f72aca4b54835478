"""Hash functions of attention: from vectors to bucket codes."""

from megasparse.ops.hashing.operator import angular_hash, sign_codes

__all__ = ["angular_hash", "sign_codes"]
