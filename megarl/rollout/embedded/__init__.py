"""The embedded engine: `transformers` models sampled in this process, for laptops, tests and small policies.

`settings` makes it, `engine` loads the model and meets the contract, `batch` decodes many requests at once, `draw`
picks tokens, `model` runs the network and names its weights as checkpoints do.
"""
