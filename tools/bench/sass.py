"""Search sm_90 assembly for registers that are overwritten while an asynchronous matrix product still reads them.

HGMMA reads its factor A from registers while later instructions run, until WARPGROUP.DEPBAR waits for its group. ptxas
before CUDA 13.3 may overwrite these registers too early (github.com/triton-lang/triton/pull/11781).
"""

import re
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\S*)\s*([^;]*);")
_WITHOUT_RESULT = re.compile(r"HGMMA|BAR|BR|CALL|RET|WARP|NANOSLEEP|R2P|\w*SETP|PLOP3")
_FACTOR = 4  # registers of A: 64 rows by 32 bytes, of 128 threads
_GROUPS = 8  # most pending groups


class Instruction(NamedTuple):
    address: int
    conditional: bool
    name: str
    operands: list[str]


def instructions(sass: str) -> list[Instruction]:
    """Return the instructions of a kernel from cuobjdump's output."""
    return [
        Instruction(int(address, 16), predicate != "", name, [x.strip() for x in operands.split(",")])
        for address, predicate, name, operands in _LINE.findall(sass)
    ]


def reuses(code: list[Instruction]) -> int:
    """Count the products whose registers may be overwritten before the wait, on any path."""
    after = _successors(code)
    return sum(_reused(code, after, i) for i, x in enumerate(code) if x.name.startswith("HGMMA"))


def _reused(code: list[Instruction], after: list[list[int]], product: int) -> bool:
    factor = _registers(code[product].operands[1], _FACTOR)
    # (instruction, True if the product's group is closed, groups closed after it)
    paths, visited = [(i, _commits(code[product]), 0) for i in after[product] if factor], set()
    while paths:
        state = i, committed, later = paths.pop()
        if state in visited:
            continue
        visited.add(state)
        instruction = code[i]
        if instruction.name.startswith("WARPGROUP.DEPBAR") and not instruction.conditional:
            if committed and later >= int(instruction.operands[1], 16):
                continue  # only later groups may still be pending
        elif _commits(instruction):
            committed, later = True, min(later + committed, _GROUPS)
        elif factor & _results(instruction):
            return True
        paths += [(j, committed, later) for j in after[i]]
    return False


def _commits(instruction: Instruction) -> bool:
    """True if the instruction closes a group of products."""
    return instruction.name.startswith("HGMMA") and "gsb0" in instruction.operands


def _successors(code: list[Instruction]) -> list[list[int]]:
    index = {x.address: i for i, x in enumerate(code)}
    after = []
    for i, x in enumerate(code):
        targets = [index[int(x.operands[-1], 16)]] if x.name.startswith("BRA") else []
        ends = x.name.startswith(("EXIT", "RET", "BRA")) and not x.conditional and len(x.operands) == 1
        after.append(targets if ends or i + 1 == len(code) else [*targets, i + 1])
    return after


def _results(x: Instruction) -> set[int]:
    """Return the registers that an instruction writes."""
    if _WITHOUT_RESULT.match(x.name):
        return set()
    operands = [operand for operand in x.operands if not re.fullmatch(r"P\w", operand)]  # SHFL writes a predicate first
    parts = x.name.split(".")
    if "128" in parts or parts[-1] == "4" or (parts[0] == "HMMA" and "F32" in parts):
        count = 4
    elif {"64", "WIDE", "F64", "2"} & set(parts) or parts[0] in ("CS2R", "DADD", "DMUL", "DFMA", "HMMA"):
        count = 2
    else:
        count = 1
    return _registers(operands[0], count) if operands else set()


def _registers(operand: str, count: int) -> set[int]:
    """Return the numbers of `count` registers starting at the operand; an empty set if it is not a register."""
    match = re.fullmatch(r"R(\d+)(?:\.\w+)*", operand)
    return set() if match is None else set(range(int(match[1]), int(match[1]) + count))
