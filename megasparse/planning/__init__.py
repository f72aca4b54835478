"""The cost of a configuration before it runs: FLOPs by formula, memory and time by one trial step."""
