"""Runs inside AppWorld's own virtual environment and imports nothing of Lemma.

Lemma starts `fork_server.py` with that environment's Python; the other files are imported by their bare names.
"""
