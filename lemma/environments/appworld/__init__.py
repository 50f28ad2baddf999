"""AppWorld: the apps of a person, in which an agent does tasks by code. docs/appworld.md says how it runs."""

from __future__ import annotations

from lemma.environments.appworld.appworld_options import AppWorldOptions

__all__ = ["AppWorldOptions"]
