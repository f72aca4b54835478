"""Hash functions of attention: from vectors to bucket codes."""

from megasparse.ops.hashing.eager import angular_hash
from megasparse.ops.hashing.sign import sign_codes

__all__ = ["angular_hash", "sign_codes"]
