"""Data, models and runs of the experiments. Needs ``lap2[train]``."""
