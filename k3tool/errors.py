"""Every failure that k3tool reports on purpose, with the exit code that scripts may rely on.

    K3Error
    ├── CheckFailed          1    a digest, an error bound or a kernel comparison did not hold
    ├── UsageError           2    unknown option, contradicting options, bad value
    ├── PartlyDone           3    part of the work is done; the same command resumes
    ├── CheckpointMissing   10    a folder, file, tensor or piece of configuration is not there
    ├── CheckpointCorrupt   11    damaged, hostile, or not what it claims to be
    ├── CapacityError       12    not enough disk, memory or device memory
    ├── RemoteError         13    network or Hub failure, authorization included
    ├── UnsupportedError    14    no such device here, or a format or layout this model cannot have
    └── Interrupted        130    stopped by the user; 143 by SIGTERM, 129 by SIGHUP

Anything else that escapes is a bug in k3tool: exit code 70 with a traceback.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class K3Error(Exception):
    """A failure with one line of cause (`message`) and one line that mends it (`hint`).

    `details` holds the named values behind the message (shard, expected, found, ...) for `--json`.
    `told`: another process of the same run, or this one, has shown it already.
    """

    exit_code = EXIT_BUG

    def __init__(self, message: str, *, hint: str = "", **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details
        self.document: dict[str, object] = {}
        self.told = False

    def with_document(self, document: dict[str, object]) -> K3Error:
        """Attach what the command found out so far: further keys of its JSON document. Returns the error itself."""
        self.document = document
        return self

    def as_json(self) -> dict[str, object]:
        document: dict[str, object] = {
            "code": self.exit_code,
            "type": type(self).__name__,
            "message": self.message,
            "hint": self.hint,
        }
        if self.details:
            document["details"] = self.details
        return document


class CheckFailed(K3Error):
    exit_code = 1


class UsageError(K3Error):
    exit_code = 2


class PartlyDone(K3Error):
    exit_code = 3


class CheckpointMissing(K3Error):
    exit_code = 10


class CheckpointCorrupt(K3Error):
    exit_code = 11


class CapacityError(K3Error):
    exit_code = 12


class RemoteError(K3Error):
    exit_code = 13


class UnsupportedError(K3Error):
    exit_code = 14


class Interrupted(K3Error):
    """A signal ended the work: the exit code is 128 and its number, as a shell has it. number: SIGINT is 2."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, hint: str = "run the same command again: it goes on from here", number: int = 2) -> None:
        words = {15: "terminated (SIGTERM)", 1: "the terminal or session is gone (SIGHUP)"}
        super().__init__(words.get(number, "interrupted"), hint=hint)
        self.exit_code = 128 + number

    @classmethod
    def of(cls, error: BaseException, hint: str) -> Interrupted:
        """What a KeyboardInterrupt says: by which signal, and in `document` what the work had done (see `tell`)."""
        interrupted = cls(hint, getattr(error, "number", 2))
        interrupted.document = getattr(error, "document", {})
        return interrupted


def tell(error: BaseException, document: dict[str, object]) -> None:
    """Attach to a failure or an interrupt on its way what the command had done: further keys of its JSON document."""
    if isinstance(error, (K3Error, KeyboardInterrupt)) and not getattr(error, "document", None):
        error.document = document  # type: ignore[union-attr]  # a KeyboardInterrupt takes it too


def is_interrupt(code: int) -> bool:
    return code in (128 + 1, EXIT_INTERRUPTED, 128 + 15)
