"""`python -m group_offload.cli` is the command `group-offload`."""

from __future__ import annotations

import sys

from .main import main

sys.exit(main())
