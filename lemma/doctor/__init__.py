"""The checks of `lemma doctor`: one small real action for each component that Lemma can use, and how to fix it."""
