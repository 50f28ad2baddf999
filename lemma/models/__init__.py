"""Models: loading, the policy, packing, attention, log-probabilities, memory arithmetic, the built-in tiny model.

Importing this package is cheap; torch and transformers come with the modules below it.
"""

import logging

# peft imports bitsandbytes wherever it is installed, which on some CPUs asks for a kernel that Lemma does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
