"""A course of teaching that can be killed at any moment: what was learned lies in a folder, from which it goes on."""

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from megasparse.data.files import replacing
from megasparse.errors import HubError
from megasparse.hub.replace import ENTRY
from megasparse.hub.teaching import Teacher

RECORD = "course.json"


class Course:
    """Passes of a Teacher over windows of text, each epoch in an order of its own."""

    def __init__(self, model: PreTrainedModel, windows: list[list[int]], held_out: list[list[int]], seed: int):
        """Prepare a course. windows, held_out: token ids, all of one length."""
        self.teacher, self.windows, self.held_out, self.seed = Teacher(model, seed), windows, held_out, seed
        given = json.dumps([getattr(model.config, ENTRY), windows, held_out, seed], sort_keys=True)
        digest = hashlib.sha256(given.encode())
        for name, weight in model.state_dict().items():  # what is taught depends on the model, in some numbers of each
            digest.update(f"{name} {weight.flatten()[:8].tolist()}".encode())
        self.identity, self.folder = digest.hexdigest(), Path()

    def run(self, passes: int, folder: Path) -> tuple[float, float]:
        """Learn up to so many passes in all. folder: where to keep what was learned; a course that stopped there goes
        on. Returns the mean loss on the held-out windows before and after. Raises HubError for another course's folder.
        """
        self.folder = folder
        record = self._begun() or {"before": self._measure(), "passes": 0}
        if record["passes"] == 0:
            self._keep(record)
        order: tuple[int, list[int]] = (-1, [])
        progress = tqdm(total=passes, initial=self.teacher.passes, unit="pass", disable=None)
        while (done := self.teacher.passes) < passes:
            epoch, place = divmod(done, len(self.windows))
            if order[0] != epoch:
                drawn = random.Random(f"{self.seed}/{epoch}")
                order = epoch, drawn.sample(range(len(self.windows)), len(self.windows))
            loss = self.teacher.learn(_tensor(self.windows[order[1][place]]))
            self._keep(record)
            progress.update()
            progress.set_postfix(loss=f"{loss:.4f}")
        progress.close()
        return record["before"], self._measure()

    def remove(self) -> None:
        """Remove the folder, whose content is in the written model."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _measure(self) -> float:
        return sum(self.teacher.measure(_tensor(tokens)) for tokens in self.held_out) / len(self.held_out)

    def _begun(self) -> dict[str, Any] | None:
        path = self.folder / RECORD
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_bytes())
            identity, passes, name = record["identity"], int(record["passes"]), str(record["state"])
        except (ValueError, LookupError, TypeError):
            raise HubError(path, "is damaged", f"Remove {self.folder} to begin again") from None
        if identity != self.identity:
            hint = f"Give the model, texts, length and seed that it began with, or remove {self.folder}"
            raise HubError(path, "is of another course", hint)
        self.teacher.load(self.folder / Path(name).name, passes)
        return {"before": float(record["before"]), "passes": passes}

    def _keep(self, record: dict[str, Any]) -> None:
        """Write the state, then the record that names it: killed in between, the one before it still counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        passes = self.teacher.passes
        state = self.folder / f"state-{passes}.safetensors"
        self.teacher.save(state)
        written = {**record, "identity": self.identity, "passes": passes, "state": state.name}
        with replacing(self.folder / RECORD) as file:
            file.write(json.dumps(written, indent=2).encode())
        for old in self.folder.glob("state-*.safetensors"):
            if old != state:
                old.unlink()


def _tensor(tokens: list[int]) -> Tensor:
    return torch.tensor([tokens])
