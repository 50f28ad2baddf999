"""Models: loading, the policy, packing, attention, log-probabilities, memory arithmetic, the built-in tiny model.

Importing this package is cheap; torch and transformers come with the modules below it.
"""
