"""The words of Lemma: its types, user errors, named random streams, ranks, events and append-only files.

Nothing here imports torch at module level, so that validating a recipe stays fast.
"""
