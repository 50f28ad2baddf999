"""Prints `docs/reference.md` from the classes that declare the options: `python -m lemma.cli.reference`."""

from __future__ import annotations

import sys

HEAD = """\
# Every option of a recipe

Made by `make docs` from the code; do not edit by hand.

A recipe is a YAML or JSON file. A section below is a path in it: `lr` under `stages.NAME.optim` is written

```yaml
stages:
  sft:
    optim:
      lr: 1e-5
```

or, on the command line, `--set stages.sft.optim.lr=1e-5`. NAME is the name you gave a stage, N the position in a list,
counted from 0. Where a section names a `kind` or a `name` in brackets, its keys are valid for that choice.
"""


def page() -> str:
    from lemma.config.describe import as_markdown
    from lemma.recipe import Recipe

    return HEAD + as_markdown(Recipe)


if __name__ == "__main__":
    sys.stdout.write(page())
