"""`python -m lemma` is the command `lemma`."""

import sys

from lemma.cli import main

if __name__ == "__main__":
    sys.exit(main())
