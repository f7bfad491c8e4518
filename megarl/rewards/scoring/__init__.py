"""Scoring for a training loop (`scorer.py`) and for files (`verify_file.py`): composition, processes, services."""
