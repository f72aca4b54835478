"""Count turns of phrase that make text hard to read, in documents, comments, docstrings and messages, and fail if one
is more frequent than its ceiling. Lower a ceiling when the text below it is rewritten; never raise one.

Usage:
    python tools/prose.py              print the table; exit code 1 if a count is above its ceiling
    python tools/prose.py beside       print the lines that match one pattern, by its name
"""

import re
import sys
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("*.md", "docs/**/*.md", "docs/*.ipynb", "tokenizers/*.md")
TEXT = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
CODE = ("megasparse/**/*.py", "tools/**/*.py", "launch/**/*.py", "docs/**/*.py")

HAVE = r"\b(?:has|have|had) (?:the|every|all|its|no|one|two|an?|those|their)\b"
PER = (
    r"\b(?:an?) (?:step|token|rank|parameter|weight|query|bucket|second|line|seed|node|key|thread|GPU|pass|host"
    r"|process)\b(?=[,.;:)|]|$)"
)
LAB = r"[Rr]ule, (?:written|set) before|\b[Nn]ot run\b|not at hand|kept here"
DISCLAIMER = r"no GPU\b|[Nn]o kernel has run|not (?:yet )?(?:been )?(?:measured|compared)|has run on a GPU"

# name: pattern, ceiling in documents, ceiling in code
PATTERNS: dict[str, tuple[str, int, int]] = {
    "what": (r"\b[Ww]hat (?!to\b|does\b)", 28, 8),
    "where": (r"\b[Ww]here\b", 0, 8),
    "has": (HAVE, 0, 23),
    "per": (PER, 11, 29),
    "is no": (r"\b(?:is|are|was|were) no\b", 1, 34),
    "that of": (r"\b(?:that|those) of\b", 0, 9),
    "of theirs": (r"\bof (?:[A-Za-z]+'s|ours|theirs|its own|their own)(?=[\s.,;:)])", 3, 17),
    "ours": (r"\b(?:ours|theirs)\b", 0, 5),
    "says": (r"\b(?:says?|said)\b", 1, 10),
    "stands": (r"\b(?:stands?|stood|lies|lie)\b", 2, 2),
    "beside": (r"\bbeside\b", 1, 5),
    "goes on": (r"\b(?:goes?|went|going) on\b", 0, 1),
    "refused": (r"\brefuse[sd]?\b", 1, 8),
    "alone": (r"\balone\b", 0, 4),
    "in place of": (r"\bin place of\b", 0, 0),
    "to the bit": (r"\bto the (?:last )?bit\b|\bbit for bit\b", 2, 1),
    "but for": (r"\bbut for\b|\ball but\b", 0, 0),
    "one's": (r"\bone's\b", 0, 0),
    "anew": (r"\banew\b", 0, 0),
    "at hand": (r"\bat hand\b|\bwant of\b", 0, 0),
    "Of": (r"(?:^|[.;:] |- )Of [a-z`A-Z]", 1, 1),
    "begin": (r"\b(?:begins?|began)\b", 1, 7),
    "counts as": (r"\bcounts? (?:once|as|here|nowhere|all|in|it)\b", 1, 3),
    "caption": (r"^\*[A-Z(][^*]*: [^*]*\*$", 0, 0),
    "lab voice": (LAB, 3, 3),
    "disclaimer": (DISCLAIMER, 1, 3),
}


@cache
def lines(globs: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the location (file:line) and the text of every line of documents, comments and strings of code."""
    rows = []
    for path in sorted({path for glob in globs for path in ROOT.glob(glob)} - {Path(__file__)}):
        parts = [(1, path.read_text(encoding="utf-8"))]
        if path.suffix == ".py":
            with path.open("rb") as file:
                tokens = tokenize.tokenize(file.readline)
                parts = [(token.start[0], token.string) for token in tokens if token.type in TEXT]
        for start, text in parts:
            rows += [(f"{path.relative_to(ROOT)}:{n}", line) for n, line in enumerate(text.splitlines(), start)]
    return rows


def matches(globs: tuple[str, ...], pattern: str) -> list[str]:
    """One `file:line: text` for each match of pattern."""
    return [f"{location}: {text.strip()}" for location, text in lines(globs) for _ in re.findall(pattern, text)]


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in PATTERNS]:
        sys.exit(f"{unknown[0]}: no such pattern. Give none for a table of all, or some of: {', '.join(PATTERNS)}")
    for name in names:
        print("\n".join(matches(DOCUMENTS + CODE, PATTERNS[name][0])))
    if names:
        return 0
    print(f"{'pattern':12}  documents (ceiling)  code (ceiling)")
    over = 0
    for name, (pattern, documents, code) in PATTERNS.items():
        counts = len(matches(DOCUMENTS, pattern)), len(matches(CODE, pattern))
        too_many = counts[0] > documents or counts[1] > code
        over += too_many
        print(f"{name:12}{counts[0]:9,} ({documents:,}){counts[1]:13,} ({code:,}){'  too many' * too_many}")
    if over:
        print("Rewrite them: `python tools/prose.py NAME` prints the lines.", file=sys.stderr)
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
