"""`python -m service.evaluation`, the same as `spd-eval`."""

import sys

from service.evaluation.cli import main

sys.exit(main())
