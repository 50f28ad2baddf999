"""Child processes, all of one kind: graders, workers of environments and agents, the Python sandbox, AppWorld.

`child.py` is the parent's side and `child_main.py` the child's; `child_frames.py` says how messages look between them.
"""

from __future__ import annotations

from lemma.children.child import Child, ChildGone, ChildSilent, PythonChild

__all__ = ["Child", "ChildGone", "ChildSilent", "PythonChild"]
