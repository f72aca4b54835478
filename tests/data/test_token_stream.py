import random
from collections.abc import Iterator

import numpy as np
import pytest
from megasparse.data.token_stream import StreamPosition, TokenStream

from megasparse.data.encoders import Encoded
from megasparse.data.workers import Workers
from tests.helpers.encoders import Doubling


class Counting(Doubling):
    def __init__(self, end: int | None):
        super().__init__(end)
        self.seen: list[bytes] = []

    def encode(self, piece: bytes) -> Encoded:
        self.seen.append(piece)
        return super().encode(piece)


def documents() -> list[list[bytes]]:
    draw = random.Random(0)
    pieces = [[draw.choice([b"", b"a b", b"cde f", b"g"]) for _ in range(draw.randrange(4))] for _ in range(30)]
    return [[], [b""], *pieces, [b"last"], []]


def lazily() -> Iterator[Iterator[bytes]]:
    return (iter(document) for document in documents())


@pytest.mark.parametrize("end", [None, 7])
@pytest.mark.parametrize("size", [2, 6, 34])
def test_from_any_place_on_the_stream_is_the_same_and_nothing_before_is_encoded(end, size):
    want: list[int] = []
    for document in documents():
        want += [byte + 256 for byte in b"".join(document) for _ in range(2)]
        want += [end] if any(document) and end is not None else []
    whole = np.array(want, dtype="<u2").tobytes()
    pieces = [piece for document in documents() for piece in document if piece]

    encoder = Counting(end)
    stream = TokenStream(lazily(), encoder, Workers(encoder.encode, 1), StreamPosition())
    places, found = [stream.place], b""
    while part := stream.read(size):
        found += part
        places.append(stream.place)
    assert found == whole and encoder.seen == pieces
    total = places[-1]
    assert total.raw_bytes == sum(map(len, pieces)) and total.words == sum(len(piece.split()) for piece in pieces)
    assert places[0] == StreamPosition() and total.token == 0

    for number, place in enumerate(places):
        encoder = Counting(end)
        stream = TokenStream(lazily(), encoder, Workers(encoder.encode, 1), place)
        assert stream.place == place
        assert stream.read(1 << 20) == whole[number * size :]
        assert stream.place == total
        assert encoder.seen == pieces[len(pieces) - len(encoder.seen) :]
        rest = sum(map(len, encoder.seen))
        assert rest <= total.raw_bytes - place.raw_bytes
