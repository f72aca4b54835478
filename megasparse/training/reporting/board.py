"""TensorBoard, which may fail without consequences: metrics.jsonl has every number too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor


class Board:
    """A SummaryWriter that the first trouble switches off until the run is started again.

    report: called then. first_step: what an earlier process wrote of this step and later ones is hidden.
    """

    def __init__(self, directory: Path, first_step: int, report: Callable[[str], None]):
        self._directory, self._report = directory, report
        self._writer: Any = None
        with self._surviving():
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and runs alone need it

            self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        with self._surviving():
            for name, value in scalars.items():
                if self._writer is not None:
                    self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        with self._surviving():
            if self._writer is not None:
                self._writer.add_text(name, text, step)
                self._writer.flush()

    def image(self, step: int, name: str, picture: Tensor) -> None:
        """Write a picture to TensorBoard. picture: (height, width, 3) uint8."""
        with self._surviving():
            if self._writer is not None:
                self._writer.add_image(name, picture.cpu(), step, dataformats="HWC")
                self._writer.flush()

    def close(self) -> None:
        with self._surviving():
            if self._writer is not None:
                self._writer.close()
        self._writer = None

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # its background thread's is raised at the next call, of whatever kind it was
            self._writer = None
            self._report(
                f"{self._directory}: TensorBoard is switched off until the run is started again ({error}). "
                "metrics.jsonl has every number"
            )
