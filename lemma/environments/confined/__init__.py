"""Confines programs and agents of a model. Files here import nothing of Lemma, only Python's own library: they run as
`python_child.py`, and inside AppWorld's own virtual environment, where they are imported by their bare names.
"""
