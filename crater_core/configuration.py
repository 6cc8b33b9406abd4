"""Reads a configuration file into a pydantic model; whatever is wrong is said with file, field, value found and what fits."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from crater_core.errors import BadConfiguration
from crater_core.model.units import parse_bytes, parse_duration_ms, parse_milli

Model = TypeVar("Model", bound=BaseModel)
FILE_BYTES_MAX = 4 * 1024**2
_SHOWN_MAX = 80
_SECRET = re.compile(r"secret|password|token$|api_key", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


class Expected(ValueError):
    """Raised by a validator of a configuration model: the text completes the sentence "expected ..."."""


class Strict(BaseModel):
    """Base of configuration models: an unknown key is an error, and a value keeps its type."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        annotation: Any = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation in (
            int,
            float,
            int | None,
            float | None,
        ):
            raise Expected("a number")
        return value


def _unit(parse: Callable[[int | float | str], int], expected: str) -> BeforeValidator:
    def read(value: Any) -> int:
        try:
            return parse(value)
        except ValueError:
            raise Expected(expected) from None

    return BeforeValidator(read)


DurationMs = Annotated[int, _unit(parse_duration_ms, "a duration such as 500ms, 30s, 2m, 1.5h or 7d")]
Bytes = Annotated[int, _unit(parse_bytes, "a size such as 512MiB, 10GB or 1.5TiB")]
Milli = Annotated[int, _unit(parse_milli, "a number with at most three decimals such as 2, 0.5 or 500m")]


def load_yaml(path: Path, model: type[Model]) -> Model:
    """The file as a `model`. Raises BadConfiguration whose fields are `file`, `field`, `found` and `expected`."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise _bad(path.name, "", "a file over 4 MiB", "a configuration file")
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise _bad(str(path), "", "no such file", "a YAML file") from None
    except UnicodeDecodeError:
        raise _bad(str(path), "", "bytes that are not UTF-8", "a YAML file in UTF-8") from None
    except OSError as error:
        raise _bad(str(path), "", error.strerror or "an unreadable file", "a readable YAML file") from error
    return parse_yaml(text, model, path.name)


def parse_yaml(text: str, model: type[Model], file: str) -> Model:
    """Like `load_yaml`, on text that is already read; `file` is the name that errors show."""
    try:
        data: object = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader, made stricter
    except _DuplicateKey as error:
        raise _bad(file, error.key, f"the key twice (line {error.line})", "each key once") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" in line {mark.line + 1}" if mark else ""
        raise _bad(file, "", f"broken YAML{line}: {error.problem or error.context}", "valid YAML") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _bad(
            file, "", f"broken YAML: {str(error).splitlines()[0] if str(error) else 'nested too deep'}", "valid YAML"
        ) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise _bad(file, "", show(data), "keys with values, such as `name: value`")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _first_error(file, model, error.errors(include_url=False)[0]) from None


def bad_value(file: str, field: str, found: object, expected: str) -> BadConfiguration:
    """The same error for a check that a model cannot make, such as one against the machine."""
    return _bad(file, field, show(found, field), expected)


def show(value: object, field: str = "") -> str:
    """A value as its file would write it; secrets are not shown."""
    if value is not None and _SECRET.search(field):
        return "a value that is not shown"
    match value:
        case None:
            text = "nothing"
        case bool():
            text = "true" if value else "false"
        case str():
            text = repr(_CREDENTIALS.sub("...@", value))
        case dict() | list() | tuple():
            inner = cast("Mapping[object, object] | list[object] | tuple[object, ...]", value)
            names = ", ".join(str(key) for key in inner) if isinstance(inner, Mapping) else f"{len(inner)} entries"
            text = f"a mapping ({names})" if isinstance(inner, Mapping) else f"a list ({names})"
        case _:
            text = str(value)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."


def _bad(file: str, field: str, found: str, expected: str) -> BadConfiguration:
    where = f"{file}: {field}" if field else file
    return BadConfiguration(
        f"{where}: found {found}; expected {expected}", file=file, field=field, found=found, expected=expected
    )


def _first_error(file: str, model: type[BaseModel], error: ErrorDetails) -> BadConfiguration:
    loc = tuple(part for part in error["loc"] if not (isinstance(part, str) and part.startswith("function-")))
    field = _path(loc)
    last = str(loc[-1]) if loc else ""
    if error["type"] == "extra_forbidden":
        known = sorted(_keys_at(model, loc[:-1]))
        near = difflib.get_close_matches(last, known, n=1)
        hint = f"`{near[0]}` (did you mean that?)" if near else f"one of: {', '.join(known)}"
        return _bad(file, field, "an unknown key", hint)
    found = "nothing" if error["type"] == "missing" else show(error["input"], last)
    context: dict[str, Any] = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, Expected):
        return _bad(file, field, found, str(cause))
    if isinstance(cause, Exception):
        where = f"{file}: {field}" if field else file
        return BadConfiguration(f"{where}: found {found}; {cause}", file=file, field=field, found=found, expected=str(cause))
    return _bad(file, field, found, _expected(error["type"], context, error["msg"]))


_EXPECTED = {
    "missing": "a value",
    "string_type": "text (in quotes where it looks like a number)",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "path_type": "a path",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "at least {min_length} character(s)",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
}


def _expected(kind: str, context: Mapping[str, Any], message: str) -> str:
    return _EXPECTED[kind].format_map(context) if kind in _EXPECTED else message.removeprefix("Input should be ").lower()


def _path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _keys_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> set[str]:
    """The keys that are known where an unknown one was found."""
    here: list[type[BaseModel]] = [model]
    for part in loc:
        inner = [kind.model_fields[str(part)].annotation for kind in here if str(part) in kind.model_fields]
        here = [found for annotation in inner for found in _models_in(annotation)] or here
    return {field.alias or name for kind in here for name, field in kind.model_fields.items()}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, list, tuple, dict, Annotated, Mapping):
        return [found for inner in get_args(annotation) for found in _models_in(inner)]
    return []


class _DuplicateKey(Exception):
    def __init__(self, key: str, line: int) -> None:
        super().__init__(key)
        self.key, self.line = key, line


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which in addition refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                key = str(cast(Any, key_node).value)
                if key in seen:
                    raise _DuplicateKey(key, key_node.start_mark.line + 1)
                seen.add(key)
        return super().construct_mapping(node, deep)
