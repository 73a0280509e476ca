"""`python -m service.emulation`, the same as `spd-emulate`."""

import sys

from service.emulation.cli import main

sys.exit(main())
