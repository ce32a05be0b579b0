"""`python -m group_offload` is the command `group-offload`."""

from __future__ import annotations

import sys

from .cli.main import main

sys.exit(main())
