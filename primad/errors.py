"""The tree of errors that primad raises for problems outside its own code. A room may derive its own from these.

    PrimadError
    ├── ModelError        the model file: missing, cut, not a GGUF, an architecture that cannot be cut
    │   └── UnreadableError  the system cannot read it: its disk fails, or its permissions changed
    ├── ConfigError       a flag, an environment variable or a line of the configuration file
    │   └── NotNowError   a value that may work a little later: a hub out of reach, a folder in use
    ├── PlanError         no plan: too few devices, windows that do not fit the model, too little memory
    ├── ClusterError      a device: not found, busy, another version, lost while loading
    │   └── DiskError     this device's disk: full, over its limit, refusing to read or write layers
    ├── ProtocolError     bytes from a peer that are not a valid message
    ├── EngineError       llama.cpp refused or failed
    │   ├── WeightsError  weights that are in use: their file is cut short, cannot be read or was written to
    │   ├── NotFiniteError  a window gave NaN or infinity
    │   └── GrammarError  a grammar that cannot be followed any further; one request ends, the window continues
    ├── RingError         the ring broke while serving: a device, a deadline, a process
    │   ├── NextDeviceError  the device after this one cannot be reached, or takes no steps
    │   ├── SenderError      the device before this one sent something that is not a step, or not all steps
    │   ├── AlteredStepError a step came back altered
    │   ├── LateStepError    a step did not come back in time
    │   ├── RankError        a device of a tensor-parallel group is late, gone, or sends something else
    │   └── LoadAgainError   a device has a different amount of memory than it loaded for; no device is at fault
    └── RequestError      an HTTP request that cannot be served as asked (carries status, code, parameter)
        └── PromptTooLongError  the prompt does not fit the context (carries both sizes)

The text of each is one line that names the subject, says what is wrong with it and what to do. Foreign exceptions are
translated once, at the border, with ``raise ... from exc``. ``assert`` is for mistakes in primad's own code.
"""

from __future__ import annotations


def printable(text: object, maximum: int = 300) -> str:
    """Return a foreign text as part of one line: control characters are escaped, ``maximum`` characters are kept."""
    kept = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text)[:maximum])
    return kept if len(str(text)) <= maximum else kept + "..."


class PrimadError(Exception):
    """The root. The CLI prints its text as one line and ends with exit code 2."""


class Stopped(Exception):  # noqa: N818
    """The owner ended the daemon (Ctrl-C or a termination signal); not an error, so not in the tree."""


class ModelError(PrimadError):
    """A model file that cannot be used."""


class UnreadableError(ModelError):
    """The system cannot read ``file``."""

    def __init__(self, file: str, why: object) -> None:
        super().__init__(f"{file}: cannot be read: {why}")
        self.file = file


class ConfigError(PrimadError):
    """A flag, environment variable or configuration value that cannot be used."""


class NotNowError(ConfigError):
    """A value that cannot be used now but may become usable on its own a little later: starting again is worth a try."""


class PlanError(PrimadError):
    """No plan fits the request."""


class ClusterError(PrimadError):
    """A device is missing, busy, of another version, or was lost while loading."""


class DiskError(ClusterError):
    """This device's disk cannot store or deliver layers: full, over the owner's limit, or failing."""


class ProtocolError(PrimadError):
    """Bytes from a peer that are not a valid message; the message is refused, the process continues."""


class EngineError(PrimadError):
    """llama.cpp refused a window or failed in it."""


class WeightsError(EngineError):
    """The weights in ``file`` cannot be read, or have changed since they were loaded; None: the file is not known.

    A handler must not trust that file, or any file if it is not known, until it has been read again from the disk.
    """

    def __init__(self, message: str, file: str | None) -> None:
        super().__init__(message)
        self.file = file


class NotFiniteError(EngineError):
    """A window produced NaN or infinity: the model file or this device is at fault, since its input was finite."""


class GrammarError(EngineError):
    """A request's grammar is wrong or too expensive; only that request ends."""


class RingError(PrimadError):
    """The ring broke: a device went away, a deadline passed or a ring process ended."""


class NextDeviceError(RingError):
    """The device after this one in the ring cannot be reached, or takes no steps."""


class SenderError(RingError):
    """The device before this one in the ring sent something that is not a step, skipped one, or sent NaN or infinity."""


class AlteredStepError(RingError):
    """A step came back to the head altered or corrupted; any device of the ring may have done it."""


class LateStepError(RingError):
    """A step did not come back in time."""


class RankError(RingError):
    """``device``, of the same group, is late, gone, or sends something else than the others compute."""

    def __init__(self, message: str, device: str) -> None:
        super().__init__(message)
        self.device = device


class LoadAgainError(RingError):
    """A device has a different amount of memory than it loaded its layers for, and loads them again; no device is at
    fault."""


class RequestError(PrimadError):
    """An HTTP request that cannot be served as asked.

    ``status`` is the HTTP status, ``code`` and ``param`` go into the OpenAI-shaped error object. ``of_model``: another
    model may accept the request. It may succeed after ``retry_s``, if that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        of_model: bool = False,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.of_model = of_model
        self.retry_s = retry_s


class PromptTooLongError(RequestError):
    """A prompt of (at least) ``prompt_tokens`` leaves no room for a completion in a context of ``context_tokens``.

    Clients look for "exceeds the available context size", and shorten their history.
    """

    def __init__(self, prompt_tokens: int, context_tokens: int, param: str, *, at_least: bool = False) -> None:
        tokens = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
        super().__init__(
            f"the prompt has {tokens} tokens, which with one more exceeds the available context size of {context_tokens}; "
            "shorten it, or start 'primad serve' with a larger --context",
            code="context_length_exceeded",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
