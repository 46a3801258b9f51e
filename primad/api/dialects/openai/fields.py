"""Building blocks of request fields: strict models, and validators with one-sentence errors."""

from __future__ import annotations

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    """No number in a string, no field that changes, no infinity; null means the default."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


def expecting(what: str) -> WrapValidator:
    """One clear sentence instead of an error of each member of a union."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as exc:
            raise PydanticCustomError("expected", "expected {what}", {"what": what}) from exc

    return WrapValidator(check)


def only(*allowed: object, why: str) -> AfterValidator:
    """A known but unsupported feature: only values that do not use it pass."""

    def check(value: object) -> object:
        if not any(type(value) is type(harmless) and value == harmless for harmless in allowed):
            raise PydanticCustomError("unsupported", "not supported: {why}", {"why": why})
        return value

    return AfterValidator(check)
