"""Encoders for tests, where worker processes can import them."""

import os
import signal
import time

import numpy as np

from megasparse.data.encoders import Encoded, PieceEncoder, Width
from megasparse.errors import DataError


class Doubling(PieceEncoder):
    """Two tokens of 2 bytes for each byte of a piece; some pieces do other things."""

    name, sha256 = "doubling", "0" * 64
    width: Width = 2

    def __init__(self, end: int | None = None):
        self.end = end

    def encode(self, piece: bytes) -> Encoded:
        if piece == b"refuse":
            raise DataError("book.txt", "byte 3 is strange", "Fix it")
        if piece == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        if piece == b"sleep":
            time.sleep(60)
        tokens = np.frombuffer(piece, dtype=np.uint8).astype("<u2").repeat(2) + 256
        return Encoded(tokens, len(piece), len(piece.split()))
