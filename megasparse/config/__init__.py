"""The schema of a run's configuration, with every default: `schema.py`, `finetuning.py`, `attention.py` (the registry
of mechanisms) and `deepspeed_section.py`. settings/ reads files of it and checks rules between keys.
"""
