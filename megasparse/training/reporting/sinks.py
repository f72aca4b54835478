"""Where a run's scalars, texts and pictures go beside metrics.jsonl: TensorBoard, and on request one more.

A sink that goes on with a run hides what an earlier process wrote of its first step and later ones, or writes it anew.
"""

import importlib.util
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megasparse.errors import ConfigError


class Sink(Protocol):
    """Something that takes a run's scalars, texts, and pictures (height, width, 3) uint8, each of a step."""

    def scalars(self, step: int, scalars: dict[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def image(self, step: int, name: str, picture: Tensor) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, directory: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and runs alone need it

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def image(self, step: int, name: str, picture: Tensor) -> None:
        self._writer.add_image(name, picture.cpu(), step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb, whose own variables (WANDB_PROJECT, WANDB_MODE=offline) hold. A restart goes on with it."""

    def __init__(self, directory: Path, values: dict[str, Any]):
        import wandb

        self._wandb = wandb
        identity = run_id(directory / "wandb_id")
        self._run: Any = wandb.init(id=identity, resume="allow", dir=str(directory), name=directory.name, config=values)
        self._run.define_metric("*", step_metric="step")  # wandb's own count never goes back, and a resumed run does

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: self._wandb.Html(text, inject=False)})

    def image(self, step: int, name: str, picture: Tensor) -> None:
        self._run.log({"step": step, name: self._wandb.Image(picture.cpu().numpy())})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow's tracking server, or folder; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME hold."""

    def __init__(self, directory: Path, values: dict[str, Any]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # reports to its makers what it is used for
        import mlflow

        self._client = mlflow.MlflowClient()
        path = directory / "mlflow_id"
        if not path.exists():
            experiment = mlflow.set_experiment(
                mlflow.environment_variables.MLFLOW_EXPERIMENT_NAME.get() or "megasparse"
            )
            made = self._client.create_run(experiment.experiment_id, run_name=directory.name)
            path.write_text(made.info.run_id + "\n")
        self._run: str = path.read_text().strip()
        self._client.log_dict(self._run, values, "config.json")

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._client.log_metric(self._run, name, value, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._run, text, f"{name}/{step}.txt")

    def image(self, step: int, name: str, picture: Tensor) -> None:
        self._client.log_image(self._run, picture.cpu().numpy(), f"{name}/{step}.png")

    def close(self) -> None:
        self._client.set_terminated(self._run)


SINKS: dict[str, Any] = {"wandb": WeightsAndBiases, "mlflow": MLflow}


def require(name: str) -> None:
    """Raise ConfigError where the package of a sink is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError("logging.sink", f'"{name}" is not installed', f"pip install 'megasparse[{name}]', or null")


def run_id(path: Path) -> str:
    """The name of a run that a file keeps; drawn, and written there, where there is none."""
    if not path.exists():
        path.write_text(secrets.token_hex(8) + "\n")
    return path.read_text().strip()
