"""Texts that ask for what stands far back: numbers of people's things, stated among other text and asked for later.

    python -m tests.hub.facts --texts texts/ --output facts/

writes a text of each *.txt: its characters from 1,000 to 16,000 with a line every 250 to 450, which states a new fact
or asks for an earlier one and gives the answer. Hashes and sketches that are taught on them (`megasparse convert
teach`) learn that such a place may be asked for. No wording is that of the passkey trials.
"""

import argparse
import random
from pathlib import Path

NAMES = [
    "Ada", "Boris", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Irene", "Jonas", "Karla", "Leon", "Mira",
    "Nadia", "Otto", "Petra", "Quentin", "Rosa", "Sven", "Tara", "Ulf", "Vera", "Wanda", "Xaver", "Yara", "Zeno",
]  # fmt: skip
THINGS = ["locker", "account", "ticket", "membership", "order", "invoice", "room", "file"]
FIRST = 8
"""Facts that stand before anything is asked."""


def with_facts(text: str, seed: str) -> str:
    drawn, parts, known, place = random.Random(seed), list[str](), list[tuple[str, str, int]](), 0
    while place < len(text):
        step = drawn.randrange(250, 450)
        parts.append(text[place : place + step])
        place += step
        if len(known) < FIRST or drawn.random() < 0.25:
            name, thing, number = drawn.choice(NAMES), drawn.choice(THINGS), drawn.randrange(10_000, 100_000)
            if any((name, thing) == fact[:2] for fact in known):
                continue
            known.append((name, thing, number))
            parts.append(f"\nThe number of {name}'s {thing} is {number}. {number} belongs to {name}.\n")
        else:
            name, thing, number = drawn.choice(known)
            parts.append(f"\nWhich number has {name}'s {thing}? The number of {name}'s {thing} is {number}\n")
    return "".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True)
    for number, file in enumerate(sorted(args.texts.glob("*.txt"))):
        found = with_facts(file.read_text(encoding="utf-8")[1000:16000], f"facts {number}")
        (args.output / f"{number:02}.txt").write_text(found, encoding="utf-8")
