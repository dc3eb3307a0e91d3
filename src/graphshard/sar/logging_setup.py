# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.logging_setup``: logger, and what shows its lines, with the rank."""

from __future__ import annotations

import logging

logger = logging.getLogger("graphshard")
"""The logger of the package, above those of its parts; silent until it is set up."""

logger.addHandler(logging.NullHandler())


def logging_setup(
    log_level: int | str,
    _rank: int = -1,
    _world_size: int = -1,
    log_file: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Show what `logger` gets from some level on, each line with the rank's place, from 1.

    A second call takes the place of the first.

    Raises:
        ValueError: A level that ``logging`` does not know.
        OSError: The file cannot be written.
    """
    numbers = _rank if rank is None else rank, _world_size if world_size is None else world_size
    handler: logging.Handler = (
        logging.StreamHandler() if log_file is None else logging.FileHandler(log_file, "w")
    )
    text = f"{numbers[0] + 1} / {numbers[1]} - %(name)s - %(levelname)s - %(message)s"
    handler.setFormatter(logging.Formatter(text))
    handler.setLevel(log_level)
    handler.name = __name__
    for earlier in [handler for handler in logger.handlers if handler.name == __name__]:
        logger.removeHandler(earlier)
        earlier.close()
    logger.setLevel(log_level)
    logger.propagate = False
    logger.addHandler(handler)
