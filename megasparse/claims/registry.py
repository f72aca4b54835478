"""All claims, in the order of the report."""

from megasparse.claims import learned, lsh, maps, reversible, trained, yoso
from megasparse.claims.claim import Claim
from megasparse.errors import ConfigError


def _open(name: str, paper: str, says: str, missing: str) -> Claim:
    return Claim(name, paper, says, rule="none yet", budgets={}, missing=missing)


CLAIMS = (
    trained.DUPLICATION,
    trained.BLOCKS,
    reversible.MEMORY,
    reversible.GRADIENTS,
    lsh.ROUNDS,
    trained.TRAINED_ROUNDS,
    lsh.COST,
    yoso.ESTIMATOR,
    yoso.LENGTHS,
    yoso.GRADIENT,
    yoso.MEMORY,
    _open("enwik8", "Reformer, section 5", "1.19 and 1.05 bits/dim on enwik8.", "23 and 150 hours of an A100, enwik8"),
    learned.UTILITY,
    trained.HYBRID,
    learned.LISTOPS,
    _open("glue", "YOSO, Tables 1 and 2", "GLUE as BERT's after pretraining.", "500,000 steps of pretraining, GLUE"),
    maps.NARROW_MAPS,
    learned.SAMPLERS,
)


def find(names: list[str] | None) -> list[Claim]:
    """The claims of these names, or all. Raises ConfigError for an unknown one."""
    known = {claim.name: claim for claim in CLAIMS}
    for name in names or []:
        if name not in known:
            raise ConfigError("--only", f'there is no claim "{name}"', f"Choose among {', '.join(known)}")
    return [known[name] for name in names or known]
