"""A run's sinks, which may fail without consequences: metrics.jsonl has every number too."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megasparse.config.schema import RunSettings
from megasparse.training.reporting.sinks import SINKS, Sink, TensorBoard, require


class Board:
    """TensorBoard, and the sink of `logging.sink`. The first trouble switches one off until the run is started again.

    report: called then. first_step: what an earlier process wrote to TensorBoard of it and later steps is hidden.
    Raises ConfigError where the sink's package is not installed.
    """

    def __init__(self, config: RunSettings, first_step: int, report: Callable[[str], None]):
        directory, other = Path(config.run.directory), config.logging.sink
        self._report, self._sinks = report, dict[str, Sink]()
        self._open("TensorBoard", partial(TensorBoard, directory, first_step))
        if other is not None:
            require(other)
            self._open(other, partial(SINKS[other], directory, config.model_dump(mode="json")))

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        self._each("scalars", step, scalars)

    def text(self, step: int, name: str, text: str) -> None:
        self._each("text", step, name, text)

    def image(self, step: int, name: str, picture: Tensor) -> None:
        """Write a picture (height, width, 3) uint8."""
        self._each("image", step, name, picture)

    def close(self) -> None:
        self._each("close")
        self._sinks.clear()

    def _open(self, name: str, make: Callable[[], Sink]) -> None:
        def keep() -> None:
            self._sinks[name] = make()

        self._surviving(name, keep)

    def _each(self, method: str, *arguments: Any) -> None:
        for name, sink in list(self._sinks.items()):
            self._surviving(name, partial(getattr(sink, method), *arguments))

    def _surviving(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # a background thread's is raised at the next call, of whatever kind it was
            self._sinks.pop(name, None)
            self._report(
                f"{name} is switched off until the run is started again ({error}). metrics.jsonl has every number"
            )
