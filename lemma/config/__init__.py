"""The mechanism of recipes: YAML with line numbers, --set overrides, validation, errors that say what to write."""

from lemma.config.options import Options

__all__ = ["Options"]
