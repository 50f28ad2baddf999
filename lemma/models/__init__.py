"""Models: loading, the policy, packing, attention, log-probabilities, memory arithmetic, the built-in tiny model.

Importing this package is cheap; torch and transformers come with the modules below it.
"""

import logging

# On some CPUs bitsandbytes, which peft imports wherever it is installed, asks for a faster kernel that Lemma does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
