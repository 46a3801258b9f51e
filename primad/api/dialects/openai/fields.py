"""What the fields of requests are made of: strict models, and validators that say what is wrong in one sentence."""

from __future__ import annotations

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    """No number in a string, no field that changes, no infinity; null means the default."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


def expecting(what: str) -> WrapValidator:
    """One clear sentence in place of what each member of a union has to say."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as exc:
            raise PydanticCustomError("expected", "expected {what}", {"what": what}) from exc

    return WrapValidator(check)


def only(*allowed: object, why: str) -> AfterValidator:
    """A feature that is known and not served: only the values that ask for nothing pass."""

    def check(value: object) -> object:
        if not any(type(value) is type(harmless) and value == harmless for harmless in allowed):
            raise PydanticCustomError("unsupported", "not supported: {why}", {"why": why})
        return value

    return AfterValidator(check)
