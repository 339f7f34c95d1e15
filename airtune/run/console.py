"""What the entry points share: a log on stderr, one message for a mistake, exit codes that mean something.

    0    done
    1    the data, the model or the run cannot do what was asked; the message says what and what to do
    2    the configuration is wrong
    130  interrupted from the keyboard; 143  terminated (what a pre-empted machine sends)

A traceback is for our own faults. It is also logged for the user's at AIRTUNE_LOG=debug.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TextIO

logger = logging.getLogger(__name__)

CLEAR_LINE = "\r\x1b[K"


class JobError(RuntimeError):
    """A mistake in what the user gave, or a run that cannot go on; its text is complete."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Terminated(BaseException):
    """SIGTERM arrived."""


@contextmanager
def explained(code: int = 1) -> Iterator[None]:
    """What goes wrong inside is about what the user gave: shown as one message, without a traceback.

    For the preparation of a run, whose parts raise ValueError and OSError with texts for the user. Not for
    the run itself, where either may be a fault of ours.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise JobError(str(error), code) from error


def exit_code(job: Callable[[], None], *, if_stopped: Callable[[], str]) -> int:
    """Run `job`; say what went wrong. `if_stopped` tells what to do about a run stopped from outside."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        job()
    except JobError as error:
        logger.debug("traceback", exc_info=error)
        return _fail(str(error), error.code)
    except KeyboardInterrupt:
        return _fail(f"Interrupted. {if_stopped()}", 128 + signal.SIGINT)
    except Terminated:
        return _fail(f"Terminated. {if_stopped()}", 128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def set_up_logging(err: TextIO = sys.stderr) -> None:
    """Our log on `err` (level AIRTUNE_LOG, else info); of the libraries, warnings and errors only.

    Call before transformers is imported: its own choice of level is read from the environment then.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("WANDB_SILENT", "true")
    logging.captureWarnings(True)
    handler = logging.StreamHandler(err)
    # Where progress rewrites one line of a terminal, a message takes that line away first.
    prefix = CLEAR_LINE if err.isatty() else ""
    handler.setFormatter(logging.Formatter(f"{prefix}%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for noisy in ("py.warnings", "bitsandbytes"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("airtune").setLevel(os.environ.get("AIRTUNE_LOG", "info").upper())


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"{CLEAR_LINE if sys.stderr.isatty() else ''}{message}\n")
    return code
