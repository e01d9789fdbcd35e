"""``python -m gradflow_export`` is the same as ``gradflow``."""

import sys

from gradflow_export.cli import main

sys.exit(main())
