"""Lemma."""
