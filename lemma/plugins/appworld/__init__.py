"""AppWorld: tasks in a person's apps, which an agent does by writing code. docs/appworld.md says how it runs."""

from __future__ import annotations

from lemma.plugins.appworld.appworld_options import AppWorldOptions

__all__ = ["AppWorldOptions"]
