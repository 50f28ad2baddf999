"""Engines turn prompts into completions: native (the trainer's own modules), vLLM, and transformers for comparison."""
