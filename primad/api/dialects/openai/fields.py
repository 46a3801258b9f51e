"""Building blocks of request fields: strict models, and validators with one-sentence errors."""

from __future__ import annotations

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    """A model without conversion from strings, without changes and without infinity; null means the default."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


def expecting(what: str) -> WrapValidator:
    """Give one clear sentence instead of an error for each member of a union."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as exc:
            raise PydanticCustomError("expected", "expected {what}", {"what": what}) from exc

    return WrapValidator(check)


def only(*allowed: object, why: str) -> AfterValidator:
    """Allow only values that do not use a known but unsupported feature."""

    def check(value: object) -> object:
        if not any(type(value) is type(harmless) and value == harmless for harmless in allowed):
            raise PydanticCustomError("unsupported", "not supported: {why}", {"why": why})
        return value

    return AfterValidator(check)
