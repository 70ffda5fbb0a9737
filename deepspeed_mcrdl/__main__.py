"""`python -m deepspeed_mcrdl` is the `mcrdl` command."""

import sys

from deepspeed_mcrdl.cli import main

sys.exit(main())
