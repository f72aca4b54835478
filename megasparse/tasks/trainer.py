"""Fine-tuning with transformers' own Trainer on the same task, examples and settings: an independent implementation.

Readers of the task's files and the choice of what is held out are ours; tokenizer, padding, model, head, order of
examples, optimizer and loop are transformers'.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.strict_json import parse
from megasparse.data.files import replacing
from megasparse.errors import ConfigError, HubError, UserError, did_you_mean
from megasparse.tasks import build_task
from megasparse.tasks.metrics import METRICS, require_metrics
from megasparse.tasks.run import read_examples, scheduled
from megasparse.tasks.task import Example, Task


def compare_with_trainer(config: FinetuneConfig, seeds: int, runs: Sequence[Path], json_file: Path | None) -> None:
    """Fine-tune on `seeds` seeds and print the results beside those of our finished `runs`; write all to `json_file`.

    Raises UserError for what is not installed, and ConfigError for what Trainer cannot do in the same way.
    """
    if seeds < 1:
        raise ConfigError("--seeds", f"{seeds} is too few", "Ask for 1 or more")
    require_libraries()
    task = build_task(config.task)
    check(config, task)
    metric = config.evaluation.metric or task.metrics[0]
    if metric not in task.metrics:
        raise ConfigError("evaluation.metric", f'"{metric}"', did_you_mean(metric, task.metrics))
    ours = [read_best(run, metric) for run in runs]
    if config.start.attention is not None:
        print("start.attention is left out: the model keeps its own attention", file=sys.stderr)
    results = []
    for seed in range(config.run.seed, config.run.seed + seeds):
        seeded = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        results.append(finetuned(seeded, task, metric))
        print(f"Trainer, seed {seed}: {metric} {results[-1]['value']:.4f} at step {results[-1]['step']}", flush=True)
    print("\n".join(comparison(metric, results, ours)))
    if json_file is not None:
        with replacing(json_file) as out:
            out.write(json.dumps({"metric": metric, "trainer": results, "ours": ours}, indent=2).encode() + b"\n")


def require_libraries() -> None:
    """Raises UserError where one is not installed."""
    require_metrics()
    try:
        import accelerate  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        hint = 'Install what fine-tuning needs: pip install "megasparse[tasks]"'
        raise UserError(f"{error.name}: is not installed, and transformers' Trainer needs it. {hint}") from None


def check(config: FinetuneConfig, task: Task) -> None:
    """Raises ConfigError for what Trainer cannot do in the same way."""
    if config.start.huggingface is None:
        raise ConfigError("start.huggingface", "null: Trainer begins from a HuggingFace model", "Give its folder")
    if task.form != "labels":
        problem = f'"{task.name}" predicts neither classes nor numbers'
        raise ConfigError("task.name", problem, "Give a task whose examples have labels")
    if task.towers or task.vocabulary is not None:
        problem = f'"{task.name}" {"compares two texts read apart" if task.towers else "has ids of its own"}'
        raise ConfigError("task.name", problem, "Give a task whose inputs a tokenizer can join")
    if config.run.device != "cpu" and (count := torch.cuda.device_count()) > 1:
        problem = f"Trainer would enlarge the batch for all {count} GPUs"
        raise ConfigError("run.device", problem, "Show it one of them: CUDA_VISIBLE_DEVICES=0")
    optimizer, linear = config.optimizer, "linear --set optimizer.final_fraction=0.0"
    for key, alike, plain in (
        ("lora", config.lora is None, "null"),
        ("task.too_long", config.task.too_long != "refuse", "cut"),
        ("optimizer.name", optimizer.name == "adamw", "adamw"),
        ("optimizer.schedule", optimizer.schedule == "linear" and optimizer.final_fraction <= 0.0, linear),
        ("evaluation.patience", config.evaluation.patience <= 0, "0"),
    ):
        if not alike:
            hint = f"Give both the same: --set {key}={plain}"
            raise ConfigError(key, "is set to what this comparison does not do with Trainer", hint)


def finetuned(config: FinetuneConfig, task: Task, metric: str) -> dict[str, Any]:
    """Train on one seed. Returns the best validation by the metric, and the last."""
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, set_seed

    examples, held_out = (list(split) for split in read_examples(task, config))
    config = scheduled(config, len(examples))
    folder = Path(str(config.start.huggingface))
    set_seed(config.run.seed)
    tokenizer, model = load(folder, task)
    positions = longest_input(model)
    if positions is not None and config.task.max_length > positions:
        problem = f"{config.task.max_length} tokens are more than the {positions} that {folder} reads"
        raise ConfigError("task.max_length", problem, "Lower it")
    training, optimizer, steps = config.training, config.optimizer, config.training.steps
    with tempfile.TemporaryDirectory() as output:
        wanted: dict[str, Any] = {
            "output_dir": output,
            "max_steps": steps,
            "per_device_train_batch_size": training.micro_batch,
            "gradient_accumulation_steps": training.global_batch // training.micro_batch,
            "per_device_eval_batch_size": config.evaluation.batch,
            "learning_rate": optimizer.learning_rate,
            "weight_decay": optimizer.weight_decay,
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "adam_epsilon": optimizer.eps,
            "max_grad_norm": training.gradient_clipping,
            "lr_scheduler_type": "linear",
            "warmup_steps": optimizer.warmup_steps,
            "bf16": training.precision == "bf16",
            "seed": config.run.seed,
            "eval_strategy": "steps",
            "eval_steps": config.evaluation.every,
            "logging_steps": max(1, config.logging.every),
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": config.run.device == "cpu",
            "disable_tqdm": not sys.stderr.isatty(),
        }
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**wanted),
            train_dataset=Rows(examples, tokenizer, config.task.max_length),
            eval_dataset=Rows(held_out, tokenizer, config.task.max_length),
            data_collator=DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
            compute_metrics=lambda reported: measured(task, reported.predictions, reported.label_ids),
        )
        trainer.train()
        if trainer.state.global_step % config.evaluation.every:
            trainer.evaluate()
    reported = [entry for entry in trainer.state.log_history if f"eval_{metric}" in entry]
    best = max(reported, key=lambda entry: entry[f"eval_{metric}"])
    return {
        "seed": config.run.seed, "steps": steps, "step": best["step"], "value": best[f"eval_{metric}"],
        "last": reported[-1][f"eval_{metric}"],
        "validations": [{"step": e["step"], **{n: e[f"eval_{n}"] for n in (*task.metrics, "loss")}} for e in reported],
    }  # fmt: skip


def load(folder: Path, task: Task) -> tuple[Any, Any]:
    """The tokenizer and the model, whose head is new. Raises HubError."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not folder.is_dir():
        raise HubError(folder, "is no folder", "Give that of a HuggingFace model: start.huggingface")
    head: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    if task.classes is not None:
        head = {"num_labels": len(task.classes), "problem_type": "single_label_classification"}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=torch.float32, **head
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        problem = f"transformers does not load it ({' '.join(str(error).split())[:200]})"
        raise HubError(folder, problem, "Give the folder of a model that it loads") from None
    if tokenizer.pad_token is None:
        raise HubError(folder, "its tokenizer has no padding token", "Give a model whose tokenizer has one")
    return tokenizer, model


def longest_input(model: Any) -> int | None:
    """Tokens of the longest input, where the model has a table of positions."""
    from megasparse.hub.lengthen import positions

    return positions(model) if hasattr(model.config, "max_position_embeddings") else None


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Examples encoded by transformers' own tokenizer."""

    def __init__(self, examples: Sequence[Example], tokenizer: Any, max_length: int):
        self.examples, self.tokenizer, self.max_length = examples, tokenizer, max_length

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        example = self.examples[number]
        return {**self.tokenizer(*example.inputs, truncation=True, max_length=self.max_length), "label": example.label}


def measured(task: Task, predictions: Any, labels: Any) -> dict[str, float]:
    """The task's metrics."""
    reported = predictions[0] if isinstance(predictions, tuple) else predictions
    answers = reported.reshape(-1) if task.classes is None else reported.argmax(axis=1)
    return {name: METRICS[name](labels, answers) for name in task.metrics}


def read_best(run: Path, metric: str) -> dict[str, Any]:
    """The best validation of a finished run. Raises ConfigError where it is not finished or used another metric."""
    file = run / "best.json"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8"
        hint = "Give the folder of a finished run of megasparse finetune"
        raise ConfigError(str(file), f"cannot be read ({reason})", hint) from None
    found = parse(text, str(file))
    if not isinstance(found, dict) or found.get("metric") != f"evaluation/{metric}" or found.get("value") is None:
        hint = f"Give a run with evaluation.metric = {metric}"
        raise ConfigError(str(file), f"has no value of {metric}", hint)
    return {"run": str(run), "step": found["step"], "value": found["value"]}


def comparison(metric: str, results: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """Both sides' mean and standard deviation over seeds."""
    lines = []
    for name, found in (("Trainer", results), ("ours", ours)):
        values = [each["value"] for each in found]
        if values:
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            listed = ", ".join(f"{value:.4f}" for value in values)
            lines.append(f"{name:8} {metric} {statistics.mean(values):.4f}{spread} over {len(values)} ({listed})")
    return lines
