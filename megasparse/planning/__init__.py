"""Prediction of a configuration's cost: FLOPs by formula, memory and time by counting or a trial step."""
