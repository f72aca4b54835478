"""A run's configuration: one JSON file, checked against a typed schema that holds every default.

schema.py             sections of a pretraining run: keys, types, defaults and meaning
finetuning.py         sections of a fine-tuning run
attention.py          `model.attention` and the registry of mechanisms, whose files define their own sections
section.py            the base class of sections; keys of earlier releases, which are dropped or rejected
files.py              strict JSON, shipped configurations, and `extends`
load.py               file + `--set section.key=value` -> Config
messages.py           pydantic's errors as one line: the key, the value, the hint
checks.py             rules between the keys of a run and of a model
deepspeed_section.py  every key of the `deepspeed` section, checked against DeepSpeed's own models
"""
