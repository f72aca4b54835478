"""Trials of claims: each seed's numbers go to a file as soon as they are there, so that an ended command goes on."""

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megasparse.callbacks import Progress
from megasparse.claims.claim import Budget, Claim, Judgement, Numbers, Trial
from megasparse.planning.measure import machine


def reproduce(claims: Sequence[Claim], budget: Budget, output: Path, progress: Progress) -> None:
    """Measure what is not measured yet, into OUTPUT/CLAIM/seed-N.json. A file of other settings is measured again.

    Raises UserError where a command of a claim fails.
    """
    for claim in claims:
        if claim.measure is None or budget not in claim.budgets:
            continue
        for seed in claim.seeds:
            folder = output / claim.name
            path, settings = folder / f"seed-{seed}.json", claim.budgets[budget]
            if _done(path, settings):
                progress(f"{claim.name}, seed {seed}: done before")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            said = _prefixed(progress, f"{claim.name}, seed {seed}: ")
            said(f"about {settings['minutes']} min")
            began = time.monotonic()
            numbers = claim.measure(Trial(settings, seed, folder, said))
            facts = {"command": f"megasparse reproduce --only {claim.name} --budget {budget}", "seed": seed}
            where = {"seconds": round(time.monotonic() - began, 1), "commit": _commit(), "machine": machine(_device())}
            found = {**facts, "settings": settings, **where, "numbers": numbers}
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(found, indent=1) + "\n")
            partial.replace(path)


def described(claim: Claim) -> str:
    """A claim in a few lines: what the paper says, the rule, what a trial takes."""
    lines = [f"{claim.name} ({claim.paper})", f"  says: {claim.says}"]
    if claim.measure is None:
        return "\n".join([*lines, f"  not attempted: it takes {claim.missing}"])
    minutes = [f"{settings['minutes']} min a seed ({budget})" for budget, settings in claim.budgets.items()]
    return "\n".join([*lines, f"  rule: {claim.rule}", f"  takes: {', '.join(minutes)}; {len(claim.seeds)} seeds"])


def planned(claims: Sequence[Claim], budget: Budget, output: Path) -> list[str]:
    """A line for each trial that is not done yet. Raises ConfigError for a comparison with a wrong configuration."""
    lines = []
    for claim in claims:
        if claim.measure is None or budget not in claim.budgets:
            lines.append(f"{claim.name}: not attempted on a {budget}")
            continue
        settings = claim.budgets[budget]
        if claim.check is not None:
            claim.check(settings)
        for seed in claim.seeds:
            done = _done(output / claim.name / f"seed-{seed}.json", settings)
            lines.append(f"{claim.name}, seed {seed}: {'done' if done else settings}")
    return lines


def results(claims: Sequence[Claim], budget: Budget, output: Path) -> list[dict[str, Any]]:
    """What is known of each claim: its words, `status` (verified, refuted, not attempted), the judgement, all trials.

    A claim is judged when all of its seeds are there.
    """
    found = []
    for claim in claims:
        trials = _trials(claim, budget, output)
        words = {key: getattr(claim, key) for key in ("name", "paper", "says", "rule", "missing")}
        known: dict[str, Any] = {**words, "budget": budget, "seeds": list(claim.seeds), "trials": trials}
        if claim.judge is None or len(trials) < len(claim.seeds):
            known |= {
                "status": "not attempted",
                "missing": claim.missing or f"{len(trials)} of {len(claim.seeds)} seeds",
            }
        else:
            judgement: Judgement = claim.judge([trial["numbers"] for trial in trials])
            known |= {"status": "verified" if judgement.verified else "refuted", **asdict(judgement)}
        found.append(known)
    return found


def _trials(claim: Claim, budget: Budget, output: Path) -> list[dict[str, Any]]:
    if budget not in claim.budgets:
        return []
    paths = [output / claim.name / f"seed-{seed}.json" for seed in claim.seeds]
    return [json.loads(path.read_text()) for path in paths if _done(path, claim.budgets[budget])]


def _done(path: Path, settings: Numbers) -> bool:
    return path.exists() and json.loads(path.read_text())["settings"] == settings


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda doing: progress(prefix + doing)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _commit() -> str | None:
    """The commit of this source tree, with a + where it was changed; None outside a repository."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
