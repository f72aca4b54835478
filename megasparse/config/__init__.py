"""The schema of a run's configuration, with every default. settings/ reads files of it and checks rules between keys.

schema.py             sections of a pretraining run: keys, types, defaults and meaning
finetuning.py         sections of a fine-tuning run
attention.py          `model.attention` and the registry of mechanisms, whose files define their own sections
section.py            the base class of sections; keys of earlier releases, which are dropped or rejected
files.py              strict JSON, shipped configurations, and `extends`
messages.py           pydantic's errors as one line: the key, the value, the hint
deepspeed_section.py  every key of the `deepspeed` section, checked against DeepSpeed's own models
"""
