"""How byte-level tokenizers write bytes as characters (GPT-2)."""


def alphabet() -> list[str]:
    """The printable character of each byte: itself where Latin-1 can print it, else the next one from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in shown)
    replaced = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [replaced.get(byte, chr(byte)) for byte in range(256)]


BYTE_OF = {character: byte for byte, character in enumerate(alphabet())}


def raw(piece: str) -> bytes:
    """The bytes that a piece stands for; one with another character in it stands for itself."""
    return bytes(BYTE_OF[c] for c in piece) if all(c in BYTE_OF for c in piece) else piece.encode()
