# SPDX-License-Identifier: Apache-2.0
"""``python -m graphshard``."""

from .train.commands import main

if __name__ == "__main__":
    main()
