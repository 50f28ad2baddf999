"""What a Python program calls: `lemma.train`, `lemma.evaluate`, `lemma.generate`, `lemma.load_run`: docs/python.md."""
