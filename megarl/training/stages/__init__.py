"""The stages of a run: each kind is its settings (`settings.py`) and one file that says what a step of it does."""
