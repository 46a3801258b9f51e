"""The hub's own library: whether it is installed, its endpoint and token, and its errors as one line each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from primad.errors import ConfigError, DiskError, NotNowError, printable


class NoRepositoryError(ConfigError):
    """A repository that the hub does not have."""


def token() -> str | None:
    """The owner's token for the hub: from HF_TOKEN, or the one that the hub's own library has stored."""
    found: str | None = library().get_token()
    return found


def asked(name: object, ask: Callable[[], Any]) -> Any:
    """Call the hub's library; turn its exceptions into one-line errors of primad."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.GatedRepoError as exc:
        raise ConfigError(
            f"{name}: its publisher requires consent; give it on the model's page, and set HF_TOKEN"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise NoRepositoryError(
            f"{name}: the hub has no such repository, or not for everybody; look at the name, or set HF_TOKEN"
        ) from exc
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled) as exc:
        raise NotNowError(f"{name}: the hub refuses it: {_first_line(exc)}; try again later") from exc
    except OSError as exc:
        if exc.errno is not None and exc.filename is not None:
            raise DiskError(
                f"{exc.filename}: cannot be written: {exc.strerror}; make room or the folder writable"
            ) from exc
        raise NotNowError(f"{name}: {_unreachable(exc)}") from exc
    except Exception as exc:  # what the library's own HTTP client raises has no common root with it
        raise NotNowError(f"{name}: {_unreachable(exc)}") from exc


def _unreachable(exc: BaseException) -> str:
    return f"the hub cannot be reached ({_first_line(exc)}); go online, or name a GGUF file that is here"


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(exc).__name__, 160).rstrip(".")


def library() -> Any:
    """The hub's own library, which takes long to import. Raises ``ConfigError`` if it is not installed."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "huggingface_hub: is not installed, and models by name need it; reinstall primad, or name a GGUF file"
        ) from exc
    return huggingface_hub


def endpoint() -> str | None:
    """The hub that the owner chose instead of Hugging Face's; None for Hugging Face's."""
    return os.environ.get("HF_ENDPOINT") or None


def bar_class(advance: Callable[[int, int | None], None], check: Callable[[], None]) -> Any:
    """A progress bar class for the hub's library: it passes bytes and total to ``advance``, and what ``check`` raises
    ends the download."""

    class Bar:
        def __init__(self, *_: object, total: int | None = None, initial: int = 0, **__: object) -> None:
            self.n, self.total = initial, total

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            check()
            self.n += int(count or 0)
            advance(self.n, self.total)

        def set_postfix_str(self, *_: object, **__: object) -> None:
            pass

        refresh = close = set_postfix_str

    return Bar
