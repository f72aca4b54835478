"""Count turns of phrase that make the text hard to read, in documents and in code, and fail if one has become more
frequent than its ceiling. Lower a ceiling when the text below it is rewritten; never raise one.

Usage:
    python tools/prose.py              print the table; exit code 1 if a count is above its ceiling
    python tools/prose.py beside       print the lines that match one pattern, by its name
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "tokenizers/*.md")
CODE = ("megasparse/**/*.py", "tools/**/*.py", "launch/**/*.py")

HAVE = r"\b(?:has|have|had) (?:the|every|all|its|no|one|two|an?|those|their)\b"
PER = (
    r"\b(?:an?) (?:step|token|rank|parameter|weight|query|bucket|second|line|seed|node|key|thread|GPU|pass|host"
    r"|process)\b(?=[,.;:)|]|$)"
)
LAB = r"[Rr]ule, (?:written|set) before|\b[Nn]ot run\b|not at hand|kept here"
DISCLAIMER = r"no GPU\b|[Nn]o kernel has run|not (?:yet )?(?:been )?(?:measured|compared)|has run on a GPU"

# name: pattern, ceiling in documents, ceiling in code
PATTERNS: dict[str, tuple[str, int, int]] = {
    "what": (r"\b[Ww]hat (?!to\b|does\b)", 87, 456),
    "where": (r"\b[Ww]here\b", 55, 751),
    "has": (HAVE, 41, 285),
    "per": (PER, 40, 144),
    "is no": (r"\b(?:is|are|was|were) no\b", 6, 181),
    "that of": (r"\b(?:that|those) of\b", 31, 169),
    "of theirs": (r"\bof (?:[A-Za-z]+'s|ours|theirs|its own|their own)(?=[\s.,;:)])", 26, 142),
    "ours": (r"\b(?:ours|theirs)\b", 50, 198),
    "says": (r"\b(?:says?|said)\b", 22, 108),
    "stands": (r"\b(?:stands?|stood|lies|lie)\b", 15, 112),
    "beside": (r"\bbeside\b", 38, 93),
    "goes on": (r"\b(?:goes?|went|going) on\b", 6, 25),
    "refused": (r"\brefuse[sd]?\b", 8, 69),
    "alone": (r"\balone\b", 20, 89),
    "in place of": (r"\bin place of\b", 13, 34),
    "to the bit": (r"\bto the (?:last )?bit\b|\bbit for bit\b", 6, 12),
    "but for": (r"\bbut for\b|\ball but\b", 0, 18),
    "one's": (r"\bone's\b", 3, 18),
    "anew": (r"\banew\b", 5, 17),
    "at hand": (r"\bat hand\b|\bwant of\b", 3, 2),
    "Of": (r"(?:^|[.;:] |- )Of [a-z`A-Z]", 2, 8),
    "begin": (r"\b(?:begins?|began)\b", 9, 156),
    "counts as": (r"\bcounts? (?:once|as|here|nowhere|all|in|it)\b", 8, 52),
    "caption": (r"^\*[A-Z(][^*]*: [^*]*\*$", 0, 0),
    "lab voice": (LAB, 31, 4),
    "disclaimer": (DISCLAIMER, 11, 11),
}


def matches(globs: tuple[str, ...], pattern: str) -> list[str]:
    """One `file:line: text` for each match of pattern."""
    rows = []
    for path in sorted({path for glob in globs for path in ROOT.glob(glob)} - {Path(__file__)}):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            row = f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            rows += [row] * len(re.findall(pattern, line))
    return rows


def main(names: list[str]) -> int:
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
