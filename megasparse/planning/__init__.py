"""What a configuration costs, before it runs: FLOPs by formula, memory and time by one trial step."""
