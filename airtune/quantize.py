"""Pack a model's weights: `python -m airtune.quantize model.path=... scheme=nf4 output_dir=...`.

The packed copy is a `model.path` for every other command. Interrupted, the same command goes on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict

from airtune.compose import from_command_line
from airtune.config import QuantizeConfig

logger = logging.getLogger("airtune.quantize")  # run as a command, the module's own name is __main__


def quantize(config: QuantizeConfig) -> None:
    """Write the packed copy, and say how large it is. JobError when it cannot be done."""
    from airtune.model.quantising import quantise
    from airtune.run.console import explained

    with explained():
        done = quantise(scheme=config.scheme, output_dir=config.output_dir, **asdict(config.model))
    sys.stdout.write(
        f"{config.output_dir}: {config.scheme}, {100 * done.share:.1f} % of the bytes packed, "
        f"{done.source_nbytes / 1e9:.2f} GB -> {done.nbytes / 1e9:.2f} GB\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code (see `run.console`)."""
    config = from_command_line(argv, QuantizeConfig)
    from airtune.run.console import exit_code, set_up_logging

    set_up_logging()
    logger.info("Packing %s as %s into %s", config.model.path, config.scheme, config.output_dir)
    return exit_code(
        lambda: quantize(config), if_stopped=lambda: "The same command goes on where it stopped."
    )


if __name__ == "__main__":
    sys.exit(main())
